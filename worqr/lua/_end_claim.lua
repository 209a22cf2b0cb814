-- USES reference counts
-- Forgets an active job: its record, and its place among the twins of its payload.
local function end_job(base, id)
  local active = base .. ':active:' .. id
  local digest = redis.call('HGET', active, 'twin')
  if digest then
    redis.call('SREM', base .. ':twins:' .. digest, id)
  end
  redis.call('DEL', active)
end

-- Deletes what lies under `claim`; false if nothing does. Its place in the worker's set of claims is the caller's to remove.
local function end_claim(base, claim)
  local item = redis.call('LPOP', base .. ':claim:' .. claim)
  local id = item and job_id(item)
  if id then
    end_job(base, id)
  end
  return item ~= false
end

-- True if the cancellation of `claim` was asked for: takes the mark away and tells whoever waits for it.
local function take_mark(base, claim)
  if redis.call('SREM', base .. ':cancelling', claim) == 0 then
    return false
  end
  tally(base, 'cancelled', 1)
  redis.pcall('PUBLISH', base .. '_cancelled', claim)
  return true
end
