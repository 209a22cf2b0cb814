-- USES counts mark own result twins
-- Deletes the record of a job that does not run, wherever its place in line is (that is the caller's), and tells whoever
-- waits for it that it was cancelled. `ttl` as keep_result.
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

-- Cancels the job `id` where it waits, is due or is blocked, in O(log n). Answers 1, or 0 if it does none of this.
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

-- Notes in the record of the job `id`, if it runs, why it is to be cancelled. Answers its claim and its worker, or nil: the
-- caller marks the claim. `last`: the dispatches up to this one are cancelled with it, for their handles (nil: only its own).
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

-- Marks the run of the job `id`, if it runs. Answers its claim, or nil. `last` as reject_run.
local function cancel_running(base, id, reason, last)
  local claim = reject_run(base, id, reason, last)
  if claim then
    mark(base, claim)
  end
  return claim
end

-- Cancels whatever there is of the job `id`, and frees the id, also of a job that has ended. Answers how many did not run (0
-- or 1), and the claim of the one that runs, or nil.
local function cancel_one(base, id, reason)
  local blocked = redis.call('SISMEMBER', base .. ':blocked', id) == 1
  local last = blocked and redis.call('HGET', base .. ':job:' .. id, 'last')
  local waiting = cancel_waiting(base, id, any_result_ttl(base), reason)
  redis.call('DEL', base .. ':taken:' .. id)
  tally(base, 'cancelled', waiting, {id})
  return waiting, cancel_running(base, id, reason, last)
end
