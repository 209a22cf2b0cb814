-- Returns up to `limit` of the claims, newest first. If there are more, the order is computed once and kept until all are done.
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

-- Removes `worker` from the fence and gives up to `limit` of its claims back, newest first, which restores the old order.
-- Counter 'stalls': recovery of a dead worker; '': the worker leaves. Both use this code. Returns ok or more, then how many.
local function take_back(base, worker, limit, counter)
  local claims, policy = base .. ':claims:' .. worker, base .. ':policy:' .. worker
  check_types(base)
  check_aside_types(base, worker)
  local how = policy_of(base, worker)
  how.counter, how.limit, how.kind, how.reason, how.now = counter, how.max_stalls, 'failed', 'stalled', now_ms()
  if counter ~= '' then
    how.error_type, how.error_traceback, how.retry_message = 'Stalled', '', 'its worker died while it ran'
    how.error_message = 'its workers died while it ran, as often as max_stalls allows'
  end
  local ended, ready, ids = {given = 0, cancelled = 0, dropped = 0, aside = 0, gone = 0}, 0, {}
  for _, claim in ipairs(newest_first(base, worker, limit)) do
    if redis.call('SREM', claims, claim) == 1 then
      local word, put, id = give_back(base, claim, how)
      ended[word], ready, ids[#ids + 1] = ended[word] + 1, ready + put, id
    end
  end
  redis.call('SREM', base .. ':hungry', worker)
  tally(base, counter == '' and 'stopped' or 'stalled', ended.given, ids) -- the others were counted when they ended
  local anything_left = redis.call('LLEN', base) + redis.call('LLEN', base .. ':suspects') > 0
  wake(base, math.max(ready, anything_left and 1 or 0)) -- the worker may have consumed a wake-up
  if redis.call('EXISTS', claims) == 1 then
    redis.call('HSET', base .. ':workers', worker, LEAVING)
    return {'more', ended.given, ended.cancelled, ended.aside}
  end
  redis.call('HDEL', base .. ':workers', worker)
  redis.call('ZREM', base .. ':result_ttls', worker)
  redis.call('DEL', policy, base .. ':leaving:' .. worker)
  return {'ok', ended.given, ended.cancelled, ended.aside}
end
