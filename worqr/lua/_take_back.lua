-- USES give_back wake serving types
-- Up to `limit` of the claims, newest first. Of more than that the order is found once and kept, until all are given back.
local function newest_first(base, worker, limit)
  local claims, order = base .. ':claims:' .. worker, base .. ':leaving:' .. worker
  if redis.call('EXISTS', order) == 0 then
    if redis.call('SCARD', claims) <= limit then
      return redis.call('SORT_RO', claims, 'DESC')
    end
    redis.call('SORT', claims, 'STORE', order)
  end
  return redis.call('RPOP', order, limit)
end

-- Takes `worker` out of the fence and gives up to `limit` of its claims back, newest first, so that the old order stands.
-- With counter 'stalls' this is a sweep, with '' the worker leaves: one code path. Answers ok or more, then how many.
local function take_back(base, worker, limit, counter)
  local claims, policy = base .. ':claims:' .. worker, base .. ':policy:' .. worker
  check_types(base)
  local kept = redis.call('HMGET', policy, 'max_stalls', 'keep_failed')
  local max_stalls = tonumber(kept[1]) or 3
  local how = {
    counter = counter, limit = max_stalls, max_stalls = max_stalls, keep = kept[2] or '1000', kind = 'failed',
    reason = 'stalled', worker = worker, error_type = 'Stalled', error_traceback = '',
    error_message = 'its worker died ' .. string.format('%.0f', max_stalls) .. ' times while it ran',
  }
  local ended = {given = 0, cancelled = 0, dropped = 0, aside = 0, gone = 0}
  for _, claim in ipairs(newest_first(base, worker, limit)) do
    if redis.call('SREM', claims, claim) == 1 then
      local word = give_back(base, claim, how)
      ended[word] = ended[word] + 1
    end
  end
  redis.call('SREM', base .. ':hungry', worker)
  if counter ~= '' then
    tally(base, 'stalled', ended.given + ended.aside)
  end
  wake(base, ended.given)
  if redis.call('EXISTS', claims) == 1 then
    redis.call('HSET', base .. ':workers', worker, LEAVING)
    return {'more', ended.given, ended.cancelled, ended.aside}
  end
  redis.call('HDEL', base .. ':workers', worker)
  redis.call('DEL', policy, base .. ':leaving:' .. worker)
  return {'ok', ended.given, ended.cancelled, ended.aside}
end
