-- USES line
-- What a sweep, or whoever else speaks for a worker, must know of its handler.
local function policy_of(base, worker)
  local kept = redis.call('HMGET', base .. ':policy:' .. worker, 'max_stalls', 'keep_failed', 'on_failure',
    'result_ttl')
  return {worker = worker, max_stalls = tonumber(kept[1]) or 3, keep = kept[2] or '1000', on_failure = kept[3] == '1',
    ttl = tonumber(kept[4]) or 0}
end

-- Milliseconds that results are kept on this queue if the job itself does not say: as any of its workers says.
local function any_result_ttl(base)
  for _, worker in ipairs(redis.call('HKEYS', base .. ':workers')) do
    local ttl = tonumber(redis.call('HGET', base .. ':policy:' .. worker, 'result_ttl'))
    if ttl then
      return ttl
    end
  end
  return 0
end

-- Makes room for the result of a newer dispatch; that of an earlier one stays for whoever is about to read it.
local function retire_result(base, id)
  local result = base .. ':result:' .. id
  if redis.call('EXISTS', result) == 1 then
    redis.call('RENAME', result, base .. ':older_result:' .. id)
  end
end

-- What a result keeps of the tries of a job: `kept` has the values of TRIES in its record, `uncounted` are the tries that the
-- three counters do not count.
local TRIES = {'failures', 'stalls', 'timeouts', 'progress', 'message'}
local function tries_of(kept, uncounted)
  local attempts = (tonumber(kept[1]) or 0) + (tonumber(kept[2]) or 0) + (tonumber(kept[3]) or 0) + uncounted
  return {failures = kept[1], attempts = attempts, progress = kept[4], message = kept[5]}
end

-- What is not there is 0 or empty; attempts 1.
local function write_tries(result, tries)
  for _, name in ipairs({'failures', 'attempts', 'progress', 'message'}) do
    local value = tries[name]
    if value and value ~= '' and value ~= (name == 'attempts' and 1 or 0) then
      redis.call('HSET', result, name, value)
    end
  end
end

-- Keeps how the job `id` ended, for as long as its `result_ttl` (false: ttl) says, and tells whoever waits. `first` and
-- `last` are the dispatches that it belongs to; `facts` names and values in turn; `tries` what `tries_of` found.
local function keep_result(base, id, first, last, result_ttl, ttl, outcome, facts, tries)
  ttl = tonumber(result_ttl) or ttl
  if ttl > 0 then
    local result = base .. ':result:' .. id
    retire_result(base, id)
    redis.call('HSET', result, 'outcome', outcome, 'first', first or '0', 'last', last or '0', unpack(facts))
    write_tries(result, tries)
    redis.call('PEXPIRE', result, string.format('%.0f', ttl))
  end
  tell(base, id, outcome)
end
