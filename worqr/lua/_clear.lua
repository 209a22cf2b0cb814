-- USES counts
-- Puts all that waits out of reach in O(1), to be purged in steps. Answers how many tasks waited, or nil while an
-- earlier clearing is still to be purged.
local function clear(base)
  if redis.call('EXISTS', base .. ':trash', base .. ':trash_suspects') > 0 then
    return nil
  end
  local waiting = redis.call('LLEN', base) + redis.call('LLEN', base .. ':suspects')
  waiting = math.max(0, waiting - (tonumber(redis.call('HGET', base .. ':counts', 'stale')) or 0))
  if redis.call('EXISTS', base) == 1 then
    redis.call('RENAME', base, base .. ':trash')
  end
  if redis.call('EXISTS', base .. ':suspects') == 1 then
    redis.call('RENAME', base .. ':suspects', base .. ':trash_suspects')
  end
  redis.call('HDEL', base .. ':counts', 'stale')
  return waiting
end
