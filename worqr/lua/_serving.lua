-- The fence is a hash: worker -> number, first claim, count and suspect of its last start request. A worker whose claims are
-- given back in several steps has the value `leaving` until the last step: it claims nothing, but its claims can be listed.
local LEAVING = 'leaving'

-- Returns what the fence holds of `worker`; nil if the worker does not serve the queue, or leaves it.
local function place_in_fence(workers, worker)
  local place = redis.call('HGET', workers, worker)
  if place and place ~= LEAVING then
    return place
  end
  return nil
end

-- Returns why a claim is not among those of `worker`: the worker settled it before (a resend), or its claims were recovered.
local function why_not_held(workers, worker)
  return place_in_fence(workers, worker) and 'mine' or 'lost'
end
