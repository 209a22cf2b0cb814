-- USES line own retire_result
-- What a sweep, or whoever else speaks for a worker, must know of its handler.
local function policy_of(base, worker)
  local kept = redis.call('HMGET', base .. ':policy:' .. worker, 'max_stalls', 'keep_failed', 'on_failure',
    'result_ttl')
  return {worker = worker, max_stalls = tonumber(kept[1]) or 3, keep = kept[2] or '1000', on_failure = kept[3] == '1',
    ttl = tonumber(kept[4]) or 0}
end

-- Milliseconds that results are kept on this queue if the job itself does not say: the longest of what its workers say. One
-- read, however many workers there are.
local function any_result_ttl(base)
  return tonumber(redis.call('ZRANGE', base .. ':result_ttls', -1, -1, 'WITHSCORES')[2]) or 0
end

-- Notes in a result what was known of the tries: failures if there were any, attempts if it is not 1, and how far the last one
-- had come. `kept`: failures, stalls, timeouts, progress, message. `uncounted`: the tries that the three counters do not count.
local function note_tries(result, kept, uncounted)
  local attempts = (tonumber(kept[1]) or 0) + (tonumber(kept[2]) or 0) + (tonumber(kept[3]) or 0) + uncounted
  if attempts ~= 1 then
    redis.call('HSET', result, 'attempts', attempts)
  end
  if (tonumber(kept[1]) or 0) > 0 then
    redis.call('HSET', result, 'failures', kept[1])
  end
  if kept[4] and kept[4] ~= '' then
    redis.call('HSET', result, 'progress', kept[4])
  end
  if kept[5] and kept[5] ~= '' then
    redis.call('HSET', result, 'message', kept[5])
  end
end

-- As `note_tries`, of what the record `key` says; false for `result`: nothing is kept.
local function keep_tries(result, key, uncounted)
  if result then
    local kept = own(redis.pcall('HMGET', key, 'failures', 'stalls', 'timeouts', 'progress', 'message')) or {}
    note_tries(result, kept, uncounted)
  end
end

-- Keeps how the job `id` ended, for as long as its `result_ttl` (false: ttl) says, and tells whoever waits. `first` and
-- `last` are the dispatches that it belongs to; `facts` names and values in turn.
-- Answers the key of the result, or false.
local function keep_result(base, id, first, last, result_ttl, ttl, outcome, facts)
  ttl = tonumber(result_ttl) or ttl
  local result = ttl > 0 and base .. ':result:' .. id
  if result then
    retire_result(base, id)
    redis.call('HSET', result, 'outcome', outcome, 'first', first or '0', 'last', last or '0', unpack(facts))
    redis.call('PEXPIRE', result, string.format('%.0f', ttl))
  end
  tell(base, id, outcome)
  return result
end
