-- Deletes what is stored under `claim`. Returns false if there is nothing, else how many blocked jobs became claimable, and the
-- id, if it is a job. The caller removes the claim from the worker's set of claims.
local function end_claim(base, claim, how)
  local item = redis.pcall('LPOP', base .. ':claim:' .. claim)
  if not item or item.err then
    own(item)
    return false
  end
  local id = job_id(item)
  return id and end_job(base, id, how) or 0, id
end

-- Returns true if the cancellation of `claim` was requested; removes the mark and notifies the callers that wait for it. The
-- caller counts the cancellation.
local function take_mark(base, claim)
  if redis.call('SREM', base .. ':cancelling', claim) == 0 then
    return false
  end
  redis.pcall('PUBLISH', base .. '_cancelled', claim)
  return true
end
