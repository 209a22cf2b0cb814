-- A job: its id, its record, its state and place in the queue, its end, and its cancellation.
-- What a dispatch changes is in _dispatch.lua, what a claim changes in _claim.lua. The `state` of a record is waiting (a
-- reference is in a list), due (the id is in the set of due times), blocked (a job with the same id runs) or active. A
-- reference only marks a position: one whose record is not waiting is skipped.

-- A task item is a payload, or this marker and the id of a job whose record holds the payload.
local MARKER = '\0worqr\0'

-- Returns the id of the job that `item` refers to; nil for a payload.
local function job_id(item)
  if string.sub(item, 1, 7) == MARKER then
    return string.sub(item, 8)
  end
  return nil
end

-- Returns an id for a job that was dispatched without one: a number that is unique on this queue, and the `random`
-- characters that its producer sent. Without these (nil), the id can be guessed. In a further shard of a queue the id ends
-- with the tag of that shard, by which clients find the job.
local function new_id(base, number, random)
  local id = random and '@' .. number .. '-' .. random or '@' .. number
  if string.sub(base, -1) == '}' then
    return id
  end
  return id .. (string.match(base, '(~%w+)}%-shard') or '')
end

-- True if the dispatch `number` (0: any) is among those from `first` to `last`.
local function covers(number, first, last)
  return number == 0 or (number >= whole_number(first, 0, NEVER) and number <= whole_number(last, 0, NEVER))
end

-- Returns the key of the record of a job that has not ended: `active` or `job`; nil if there is none. If both exist, it is
-- the active one, unless the dispatch `number` belongs to the other. A record in the trash does not count.
local function find_live_record(active, job, counts, number)
  local run = redis.call('HMGET', active, 'claim', 'first', 'last')
  if run[1] and covers(number, run[2], run[3]) then
    return active
  end
  local kept = redis.call('HMGET', job, 'queued', 'first', 'last')
  if kept[1] and covers(number, kept[2], kept[3])
    and whole_number(kept[1], NEVER, NEVER) > whole_number(redis.call('HGET', counts, 'cleared'), 0, NEVER) then
    return job
  end
  return nil
end

-- Returns the summary of the task `item` that is shown to people: its id (false for a raw task), the first 100 bytes of its
-- payload, its size (false: not known), and the fields of the job's record, whose `kind` is active or job. `room.left` is how many bytes of payload may
-- still be read. A hash field can only be read whole, and a longer payload is shown as empty. If another application
-- replaced the record, only the id is shown.
local function summarize(base, kind, item, room)
  local id = job_id(item)
  if not id then
    return {false, string.sub(item, 1, 100), #item}
  end
  local record, task = base .. ':' .. kind .. ':' .. id, ''
  local size = own(redis.pcall('HSTRLEN', record, 'task'))
  if not size then
    return {id, '', false, false, false, false, false, false, false, false, false, false, false, false, false}
  end
  if size <= room.left then
    task, room.left = redis.call('HGET', record, 'task') or '', room.left - size
  end
  local kept = redis.call('HMGET', record, 'state', 'claim', 'worker', 'run_at', 'progress', 'message', 'failures',
    'stalls', 'timeouts', 'error_type', 'error_message', 'timeout')
  return {id, string.sub(task, 1, 100), size, unpack(kept)}
end

-- Notifies the callers that watch the job. The message is a hint: they read the state themselves.
local function notify(base, id, event)
  redis.pcall('PUBLISH', base .. ':job:' .. id, event)
end

-- Returns the state of a job that is due at `run_at`.
local function state_at(run_at, now)
  return run_at > now and 'due' or 'waiting'
end

-- Puts the job `id` into the queue, or among the due jobs until `run_at`. Its record already has the new state, and no list
-- has the job yet. It goes to the back, or to the `front`; a suspect goes to the suspects. A job of a `lane` goes into its
-- lane, a suspect to the front of it. Returns 1 if it is claimable now, else 0.
local function place(base, id, run_at, now, front, suspect, lane)
  if run_at > now then
    local due = base .. ':due'
    redis.call('ZADD', due, string.format('%.0f', run_at), id)
    if redis.call('ZRANGE', due, 0, 0)[1] == id then
      announce_moment(base, run_at - now)
    end
    notify(base, id, 'due')
    return 0
  end
  if lane then
    local ready = push_to_lane(base, lane, MARKER .. id, front or suspect, now)
    notify(base, id, 'waiting')
    return ready
  end
  local list = suspect and base .. ':suspects' or base
  redis.call(front and 'RPUSH' or 'LPUSH', list, MARKER .. id)
  notify(base, id, 'waiting')
  return 1
end

-- Like `place`, but writes the state into the record too.
local function enqueue_job(base, id, run_at, now, front, suspect, lane)
  redis.call('HSET', base .. ':job:' .. id, 'state', state_at(run_at, now))
  return place(base, id, run_at, now, front, suspect, lane)
end

-- Puts the job that was blocked by the active job `id` into the queue. Returns 1 if it is claimable now, else 0.
local function unblock(base, id, now)
  if redis.call('SREM', base .. ':blocked', id) == 0 then
    return 0
  end
  local job = base .. ':job:' .. id
  local cleaned = redis.pcall('HDEL', job, 'update_data', 'update_counts', 'update_policy', 'update_low', 'update_high')
  if not own(cleaned) then
    return 0
  end
  local kept = redis.call('HMGET', job, 'run_at', 'lane')
  return enqueue_job(base, id, whole_number(kept[1], 0, LATEST), now, false, false, kept[2])
end

-- Puts up to `limit` due jobs into the queue. Returns how many of them can be claimed now.
-- LATER: most starts find enough tasks.
local function promote(base, limit, now)
  local ids = redis.call('ZRANGEBYSCORE', base .. ':due', '-inf', now, 'LIMIT', 0, limit)
  local pushed = 0
  for _, id in ipairs(ids) do
    local kept = own(redis.pcall('HMGET', base .. ':job:' .. id, 'state', 'suspect', 'lane'))
    redis.call('ZREM', base .. ':due', id)
    if kept and kept[1] == 'due' then
      pushed = pushed + enqueue_job(base, id, 0, now, false, kept[2], kept[3])
    end
  end
  return pushed
end

-- Deletes the active job `id`, and puts a blocked job of this id into the queue. `outcome`: finished, cancelled, or gone
-- (no result is stored). `facts` of a finished job: names and values in turn. `ttl`: ms for which the result is kept if the
-- job does not say. `none_blocked`: true if no job of this queue is blocked. Returns how many tasks became claimable.
-- LATER: most tasks are no jobs.
local function end_job(base, id, outcome, facts, ttl, now, none_blocked)
  local active = base .. ':active:' .. id
  local kept = own(redis.pcall('HMGET', active, 'twin', 'first', 'last', 'result_ttl', 'cancel_reason', 'batch')) or {}
  if kept[6] then
    note_member(kept[6], outcome == 'gone' and 'lost' or outcome, id)
  end
  if kept[1] then
    remove_twin(base, kept[1], id)
  end
  local result
  if outcome == 'gone' then
    notify(base, id, 'gone')
  else
    facts = outcome == 'cancelled' and {'reason', kept[5] or ''} or facts
    result = store_result(base, id, kept[2], kept[3], whole_number(kept[4], ttl), outcome, facts)
  end
  copy_attempts(result, active, 1)
  redis.call('DEL', active)
  return none_blocked and 0 or unblock(base, id, now)
end

-- Adds a job to its twins: the jobs that were raw tasks of one payload. Only cancel_task reads them. If another application
-- owns the key, the job cannot be found by its payload; nothing else changes.
local function add_twin(base, digest, id)
  own(redis.pcall('SADD', base .. ':twins:' .. digest, id))
end

local function remove_twin(base, digest, id)
  own(redis.pcall('SREM', base .. ':twins:' .. digest, id))
end

-- Deletes the record of a job that does not run and publishes the cancellation to callers that wait for its result. The
-- caller removes the job from its list or set. `ttl`: ms for which the result is kept if the job does not say.
local function delete_cancelled_job(base, id, ttl, reason)
  local job = base .. ':job:' .. id
  local kept = redis.call('HMGET', job, 'twin', 'first', 'last', 'result_ttl', 'batch')
  if kept[1] then
    remove_twin(base, kept[1], id)
  end
  if kept[5] then
    note_member(kept[5], 'cancelled', id)
  end
  local result = store_result(base, id, kept[2], kept[3], whole_number(kept[4], ttl), 'cancelled', {'reason', reason})
  copy_attempts(result, job, 0)
  redis.call('DEL', job, base .. ':taken:' .. id)
end

-- Cancels the job `id` if it is waiting, due or blocked, in O(log n). Returns 1, or 0 if it is in none of these states.
local function cancel_queued(base, id, ttl, reason)
  local kept = own(redis.pcall('HMGET', base .. ':job:' .. id, 'state', 'queued', 'lane')) or {}
  if not kept[1] or whole_number(kept[2], NEVER, NEVER) <= cleared_up_to(base) then -- gone, or in the trash
    return 0
  end
  if kept[1] == 'waiting' then
    add_stale(base, 1)
  end
  redis.call('ZREM', base .. ':due', id)
  redis.call('SREM', base .. ':blocked', id)
  delete_cancelled_job(base, id, ttl, reason)
  if kept[3] then
    job_left_lane(base, kept[3], id, now_ms())
  end
  return 1
end

-- Stores the reason for the cancellation in the record of the job `id` if it runs. Returns its claim and its worker, or
-- nil. The caller requests the cancellation of the claim. `last`: handles of dispatches up to this one see the cancellation
-- too (nil: only the run's own).
local function store_cancel_reason(base, id, reason, last)
  local active = base .. ':active:' .. id
  local run = own(redis.pcall('HMGET', active, 'claim', 'worker')) or {}
  if not run[1] or own(redis.pcall('LINDEX', base .. ':claim:' .. run[1], 0)) ~= MARKER .. id then
    return nil -- it does not run, or another program wrote the claim
  end
  redis.call('HSET', active, 'cancel_reason', reason)
  if last then
    redis.call('HSET', active, 'last', last)
  end
  redis.call('DEL', base .. ':taken:' .. id)
  return run[1], run[2] or ''
end

-- Requests the cancellation of the run of the job `id`. Returns its claim, or nil if it does not run. `last` as in
-- store_cancel_reason.
local function cancel_running(base, id, reason, last)
  local claim = store_cancel_reason(base, id, reason, last)
  if claim then
    request_cancel(base, claim)
  end
  return claim
end

-- Cancels the job `id` in any state and frees the id, even if the job has ended. Returns how many jobs did not run (0 or
-- 1), and the claim of the run, or nil.
local function cancel_job(base, id, reason)
  local blocked = redis.call('SISMEMBER', base .. ':blocked', id) == 1
  local last = blocked and redis.call('HGET', base .. ':job:' .. id, 'last')
  local waiting = cancel_queued(base, id, longest_result_ttl(base), reason)
  redis.call('DEL', base .. ':taken:' .. id)
  count(base, 'cancelled', waiting, {id})
  return waiting, cancel_running(base, id, reason, last)
end
