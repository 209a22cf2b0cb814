-- Deletes the record of a job that does not run and publishes the cancellation to callers that wait for its result. The caller
-- removes the job from its list or set. `ttl` as in keep_result.
local function forget_job(base, id, ttl, reason)
  local job = base .. ':job:' .. id
  local kept = redis.call('HMGET', job, 'twin', 'first', 'last', 'result_ttl')
  if kept[1] then
    forget_twin(base, kept[1], id)
  end
  local result = keep_result(base, id, kept[2], kept[3], kept[4], ttl, 'cancelled', {'reason', reason})
  keep_tries(result, job, 0)
  redis.call('DEL', job, base .. ':taken:' .. id)
end

-- Cancels the job `id` if it is waiting, due or blocked, in O(log n). Returns 1, or 0 if it is in none of these states.
local function cancel_waiting(base, id, ttl, reason)
  local kept = own(redis.pcall('HMGET', base .. ':job:' .. id, 'state', 'queued')) or {}
  local cleared = tonumber(redis.call('HGET', base .. ':counts', 'cleared')) or 0
  if not kept[1] or (tonumber(kept[2]) or 0) <= cleared then -- gone, or in the trash
    return 0
  end
  if kept[1] == 'waiting' then
    tally_stale(base, 1)
  end
  redis.call('ZREM', base .. ':due', id)
  redis.call('SREM', base .. ':blocked', id)
  forget_job(base, id, ttl, reason)
  return 1
end

-- Stores the reason for the cancellation in the record of the job `id` if it runs. Returns its claim and its worker, or nil;
-- the caller marks the claim. `last`: handles of dispatches up to this one see the cancellation too (nil: only the run's own).
local function reject_run(base, id, reason, last)
  local active = base .. ':active:' .. id
  local run = own(redis.pcall('HMGET', active, 'claim', 'worker')) or {}
  if not run[1] then
    return nil
  end
  redis.call('HSET', active, 'cancel_reason', reason)
  if last then
    redis.call('HSET', active, 'last', last)
  end
  redis.call('DEL', base .. ':taken:' .. id)
  return run[1], run[2] or ''
end

-- Marks the run of the job `id` as cancelled, if it runs. Returns its claim, or nil. `last` as in reject_run.
local function cancel_running(base, id, reason, last)
  local claim = reject_run(base, id, reason, last)
  if claim then
    mark(base, claim)
  end
  return claim
end

-- Cancels the job `id` in any state and frees the id, even if the job has ended. Returns how many jobs did not run (0 or 1),
-- and the claim of the run, or nil.
local function cancel_one(base, id, reason)
  local blocked = redis.call('SISMEMBER', base .. ':blocked', id) == 1
  local last = blocked and redis.call('HGET', base .. ':job:' .. id, 'last')
  local waiting = cancel_waiting(base, id, any_result_ttl(base), reason)
  redis.call('DEL', base .. ':taken:' .. id)
  tally(base, 'cancelled', waiting, {id})
  return waiting, cancel_running(base, id, reason, last)
end
