-- USES own reference
-- LATER end_job
-- Deletes what lies under `claim`; false if nothing does, else how many twins can be taken now, and the id, if it is a job. Its
-- place in the worker's set of claims is the caller's to remove.
local function end_claim(base, claim, how)
  local item = redis.pcall('LPOP', base .. ':claim:' .. claim)
  if not item or item.err then
    own(item)
    return false
  end
  local id = job_id(item)
  return id and end_job(base, id, how) or 0, id
end

-- True if the cancellation of `claim` was asked for: takes the mark away and tells whoever waits for it. To count it is the
-- caller's.
local function take_mark(base, claim)
  if redis.call('SREM', base .. ':cancelling', claim) == 0 then
    return false
  end
  redis.pcall('PUBLISH', base .. '_cancelled', claim)
  return true
end
