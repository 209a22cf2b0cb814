-- Puts up to `limit` due jobs into the queue. Returns how many of them can be claimed now.
-- LATER: most calls of the scripts do not need it.
local function promote(base, limit, now)
  local ids = redis.call('ZRANGEBYSCORE', base .. ':due', '-inf', now, 'LIMIT', 0, limit)
  local pushed = 0
  for _, id in ipairs(ids) do
    local kept = own(redis.pcall('HMGET', base .. ':job:' .. id, 'state', 'suspect'))
    redis.call('ZREM', base .. ':due', id)
    if kept and kept[1] == 'due' then
      pushed = pushed + put_in_line(base, id, 0, now, false, kept[2])
    end
  end
  return pushed
end
