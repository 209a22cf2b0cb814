-- The result of a job: how long it is kept, how it is found, and how it is stored.

-- Returns for how many milliseconds this queue keeps results if the job does not say: the longest time that its workers
-- set. That is one read, however many workers there are.
local function longest_result_ttl(base)
  return whole_number(redis.call('ZRANGE', base .. ':result_ttls', -1, -1, 'WITHSCORES')[2], 0)
end

-- Returns the key and the outcome of the result of the dispatch `number`, or nil. The newest dispatch is 0. The older
-- result never belongs to it, even if the newest kept none. An outcome that no script writes is no result.
local function find_result(result, older_result, number)
  for _, key in ipairs({result, number ~= 0 and older_result or nil}) do
    local kept = own(redis.pcall('HMGET', key, 'outcome', 'first', 'last')) or {}
    local known = kept[1] == 'finished' or kept[1] == 'failed' or kept[1] == 'cancelled'
    if known and covers(number, kept[2], kept[3]) then
      return key, kept[1]
    end
  end
  return nil
end

-- Stores how the job `id` ended for `ttl` ms and notifies the callers that wait for it. `first` and `last` are the dispatches
-- to which the result belongs; `facts` names and values in turn. Returns the key of the result, or false if `ttl` is 0.
local function store_result(base, id, first, last, ttl, outcome, facts)
  local result = ttl > 0 and base .. ':result:' .. id
  if result then
    retire_result(base, id)
    redis.call('HSET', result, 'outcome', outcome, 'first', first or '0', 'last', last or '0', unpack(facts))
    redis.call('PEXPIRE', result, string.format('%.0f', ttl))
  end
  notify(base, id, outcome)
  return result
end

-- Makes room for the result of a newer dispatch. The result of the one before it stays for callers that are about to read
-- it.
local function retire_result(base, id)
  local result = base .. ':result:' .. id
  if redis.call('EXISTS', result) == 1 then
    redis.call('RENAME', result, base .. ':older_result:' .. id)
  end
end

-- Stores the attempt counters in a result: failures if there were any, attempts if it is not 1, and the last progress.
-- `kept`: failures, stalls, timeouts, progress, message. `uncounted`: the attempts that the three counters do not count.
local function store_attempts(result, kept, uncounted)
  local failures = whole_number(kept[1], 0)
  local attempts = failures + whole_number(kept[2], 0) + whole_number(kept[3], 0) + uncounted
  if attempts ~= 1 then
    redis.call('HSET', result, 'attempts', digits(attempts))
  end
  if failures > 0 then
    redis.call('HSET', result, 'failures', digits(failures))
  end
  if kept[4] and kept[4] ~= '' then
    redis.call('HSET', result, 'progress', kept[4])
  end
  if kept[5] and kept[5] ~= '' then
    redis.call('HSET', result, 'message', kept[5])
  end
end

-- Like `store_attempts`, from the record `key`. Does nothing if `result` is false.
local function copy_attempts(result, key, uncounted)
  if result then
    local kept = own(redis.pcall('HMGET', key, 'failures', 'stalls', 'timeouts', 'progress', 'message')) or {}
    store_attempts(result, kept, uncounted)
  end
end
