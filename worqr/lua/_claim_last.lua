-- USES fence reference
-- What a start answers for the claimed `item`: the payload, or for a job: payload id failures stalls timeouts; false for none.
local function entry_of(base, item)
  local id = item and job_id(item)
  if not id then
    return item
  end
  local kept = redis.call('HMGET', base .. ':active:' .. id, 'task', 'failures', 'stalls', 'timeouts')
  return kept[1] and {kept[1], id, tonumber(kept[2]) or 0, tonumber(kept[3]) or 0, tonumber(kept[4]) or 0}
end

-- Adds to `reply` the entries of `count` claims from `first` on: what a start has claimed before.
local function claimed_again(base, reply, first, count)
  for i = 0, count - 1 do
    local item = redis.call('LINDEX', base .. ':claim:' .. digits(first + i), 0)
    reply[#reply + 1] = entry_of(base, item)
  end
  return reply
end

-- Moves the last item of the list `source` under `claim` of `worker`; the claim's place in the worker's set of claims is the
-- caller's to add. Answers taken, its entry and the size of its payload; skipped, for a reference to nothing (or to what is no
-- record), which it takes away; or empty.
local function claim_last(base, source, worker, claim)
  local held = base .. ':claim:' .. claim
  local item = redis.call('RPOPLPUSH', source, held)
  if not item then
    return 'empty'
  end
  local id = job_id(item)
  if not id then
    return 'taken', item, #item
  end
  local job, active = base .. ':job:' .. id, base .. ':active:' .. id
  if redis.pcall('HEXISTS', job, 'task') ~= 1 or redis.call('EXISTS', active) == 1 then
    redis.call('DEL', held)
    return 'skipped'
  end
  redis.call('RENAME', job, active)
  redis.call('HSET', active, 'claim', claim, 'worker', worker)
  local entry = entry_of(base, item)
  return 'taken', entry, #entry[1]
end
