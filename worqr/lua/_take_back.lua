-- USES give_back wake
-- Takes `worker` out of the fence and gives up to `limit` of its claims back, newest first, so that the old order stands.
-- With counter 'stalls' this is a sweep, with '' the worker leaves: one code path. Answers ok or more, then how many.
local function take_back(base, worker, limit, counter)
  local claims, policy = base .. ':claims:' .. worker, base .. ':policy:' .. worker
  local kept = redis.call('HMGET', policy, 'max_stalls', 'keep_failed')
  local max_stalls = tonumber(kept[1]) or 3
  local how = {
    counter = counter, limit = max_stalls, max_stalls = max_stalls, keep = kept[2] or '1000', kind = 'failed',
    reason = 'stalled', worker = worker, error_type = 'Stalled', error_traceback = '',
    error_message = 'its worker died ' .. string.format('%.0f', max_stalls) .. ' times while it ran',
  }
  redis.call('HDEL', base .. ':workers', worker)
  redis.call('SREM', base .. ':hungry', worker)
  local ended = {given = 0, cancelled = 0, dropped = 0, aside = 0, gone = 0}
  for _, claim in ipairs(redis.call('SORT_RO', claims, 'DESC', 'LIMIT', 0, limit)) do
    redis.call('SREM', claims, claim)
    local word = give_back(base, claim, how)
    ended[word] = ended[word] + 1
  end
  if counter ~= '' then
    tally(base, 'stalled', ended.given + ended.aside)
  end
  wake(base, ended.given)
  if redis.call('EXISTS', claims) == 1 then
    return {'more', ended.given, ended.cancelled, ended.aside}
  end
  redis.call('DEL', policy)
  return {'ok', ended.given, ended.cancelled, ended.aside}
end
