-- A claim of a worker on a task: its fencing token, how it is cancelled and ended, and the ways back into the queue.
-- The item of a claim is in a list of its own, and its token in the worker's set of claims.

local LAST_TOKEN = 9000000000000000 -- the clock in the year 2255. A larger token was never assigned: doubles soon lose digits there

-- Returns the queue's next fencing token, and the clock in milliseconds. The token is above the last one and above the
-- clock, so that it never decreases.
local function next_token(base)
  local last = tonumber(redis.call('HGET', base .. ':counts', 'fence')) or 0
  if not (last >= 0 and last <= LAST_TOKEN) then
    last = 0
  end
  local time = redis.call('TIME')
  return math.max(last + 1, time[1] * 1000000 + time[2]), time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Stores the last fencing token that was assigned.
local function store_token(base, number)
  if redis.call('HSET', base .. ':counts', 'fence', digits(number)) == 1 then
    redis.call('EXPIRE', base .. ':counts', COUNTS_EXPIRE)
  end
end

-- Returns a claimed task as a table: its item, the id of its job (nil: a raw task), the id it has as a job, the fields of
-- its record, its payload, and its counters.
local function claimed_task(base, item, id, claim, fields)
  return {item = item, job = id, id = id or new_id(base, claim), fields = fields, task = fields.task,
    failures = whole_number(fields.failures, 0), stalls = whole_number(fields.stalls, 0),
    timeouts = whole_number(fields.timeouts, 0)}
end

-- Returns the claimed_task of `claim`, read before anything is written. Returns nil if there is no task, or a reference
-- without a record.
local function read_claim(base, claim)
  local item = own(redis.pcall('LINDEX', base .. ':claim:' .. claim, 0))
  if not item then
    return nil
  end
  local id = job_id(item)
  local fields = {task = item}
  if id then
    fields = read_hash(base .. ':active:' .. id)
  end
  return fields and fields.task and claimed_task(base, item, id, claim, fields) or nil
end

-- Makes the raw `task` under `claim` of `worker` a job, while it runs. `task`: a claimed_task.
local function become_job(base, worker, claim, task)
  local digest = redis.sha1hex(task.task)
  write_hash(base .. ':active:' .. task.id, {task = task.task, twin = digest, claim = claim, worker = worker,
    state = 'active', first = claim, last = claim, queued = claim})
  add_twin(base, digest, task.id)
  redis.call('LSET', base .. ':claim:' .. claim, 0, MARKER .. task.id)
end

-- Returns the entry of a start for the claimed `item`: the payload, or for a job its record as names and values, and its
-- id; and that record as a table. The entry has no `tries`, which only people read. Returns false if the record is gone.
local function entry_of(base, item)
  local id = item and job_id(item)
  if not id then
    return item
  end
  local entry = own(redis.pcall('HGETALL', base .. ':active:' .. id))
  if not entry or #entry == 0 then
    return false
  end
  local fields, last = {}, #entry + 1
  for i = 1, #entry, 2 do
    fields[entry[i]] = entry[i + 1]
  end
  if fields.tries then
    last = #entry - 1
    for i = 1, last, 2 do
      if entry[i] == 'tries' then
        entry[i], entry[i + 1] = entry[last], entry[last + 1]
      end
    end
  end
  entry[last], entry[last + 1] = 'id', id -- at the end: `count` finds the id there
  return entry, fields
end

-- Deletes what is stored under `claim`. Returns false if there is nothing, else how many blocked jobs became claimable, and
-- the id, if it is a job. The last five parameters are those of end_job. The caller removes the claim from the worker's set
-- of claims.
local function end_claim(base, claim, outcome, facts, ttl, now, none_blocked)
  local item = redis.pcall('LPOP', base .. ':claim:' .. claim)
  if not item or item.err then
    own(item)
    return false
  end
  local id = job_id(item)
  return id and end_job(base, id, outcome, facts, ttl, now, none_blocked) or 0, id
end

-- Marks `claim` for cancellation and publishes it. The worker that holds it then asks which of its claims are marked.
local function request_cancel(base, claim)
  if redis.call('SADD', base .. ':cancelling', claim) == 1 then
    redis.pcall('PUBLISH', base .. '_cancel', claim)
  end
end

-- Marks many claims and notifies each worker that holds one of them, once, on the worker's own channel. One message per
-- claim to all workers would block the server for seconds. `marked`: claims and their workers in turn.
local function request_cancels(base, marked)
  if #marked == 2 then
    return request_cancel(base, marked[1])
  end
  local claims, notified = {}, {}
  for i = 1, #marked, 2 do
    claims[#claims + 1] = marked[i]
  end
  for from = 1, #claims, 1000 do
    redis.call('SADD', base .. ':cancelling', unpack(claims, from, math.min(from + 999, #claims)))
  end
  for i = 2, #marked, 2 do
    local worker = marked[i]
    if not notified[worker] then
      notified[worker] = true
      redis.pcall('PUBLISH', base .. ':wake:' .. worker, 'c')
    end
  end
end

-- Returns true if the cancellation of `claim` was requested; removes the mark and notifies the callers that wait for it.
-- The caller counts the cancellation.
local function take_cancel_request(base, claim)
  if redis.call('SREM', base .. ':cancelling', claim) == 0 then
    return false
  end
  redis.pcall('PUBLISH', base .. '_cancelled', claim)
  return true
end

-- Returns the workers that hold claims, or may, in the order of their ids. Reads their sets of claims, so that a set of a
-- wrong type is an error before the first write.
local function claim_holders(base)
  local workers = redis.call('HKEYS', base .. ':workers')
  table.sort(workers)
  for _, worker in ipairs(workers) do
    redis.call('SCARD', base .. ':claims:' .. worker)
  end
  return workers
end

-- Returns the claims of a set in their order, at most `most` of them (nil: all). Members that can be no claims are left out: with
-- some of them, the server does not sort the set.
local function claims_in(held, most)
  local sorted = own(redis.pcall('SORT_RO', held, 'LIMIT', 0, most or -1), 'double')
  local claims = {}
  for _, claim in ipairs(sorted or own(redis.pcall('SORT_RO', held, 'ALPHA')) or {}) do
    claims[#claims + 1] = string.find(claim, '^%d+$') and claim or nil
  end
  if not sorted then
    table.sort(claims, function(one, other) return tonumber(one) < tonumber(other) end)
  end
  return claims
end

-- Calls look(claim, worker) for at most `budget` claims of `holders`, in the order of worker ids and, within each, of
-- claims. `after` is '-', or the end of the last call: a claim, a space, its worker. Returns the next `after`, '-' when all
-- are done.
local function each_claim(base, holders, after, budget, look)
  local last, behind = string.match(after, '^(%d+) (.*)$')
  for _, worker in ipairs(holders) do
    if not behind or worker >= behind then
      for _, claim in ipairs(claims_in(base .. ':claims:' .. worker)) do
        if worker ~= behind or tonumber(claim) > tonumber(last) then
          if budget <= 0 then
            return after
          end
          look(claim, worker)
          after, budget = claim .. ' ' .. worker, budget - 1
        end
      end
    end
  end
  return '-'
end

-- Ends `claim` as cancelled if its cancellation was requested, and counts it. Returns how many tasks became claimable, or
-- nil if it was not requested. `task`: the result of read_claim.
local function end_if_cancelled(base, claim, task, ttl, now)
  if not take_cancel_request(base, claim) then
    return nil
  end
  count(base, 'cancelled', 1, {task and task.job})
  return end_claim(base, claim, 'cancelled', nil, ttl, now) or 0
end

-- Says how a claim goes back into the queue. `counter`: failures, stalls, timeouts, or '' if this return is not counted.
-- `limit`: for a task without a limit of its own; the task fails when the counter reaches it. `failure`: a dead_letter_as,
-- or nil. `retry_message`: stored with a retried task instead of the failure's (nil: that). `to_back`: true for the back of
-- the queue. `run_at`: ms (nil: at once). `retried_at`: ms as text, if run_at is a delay (nil: it is none). The field `lane`,
-- which file_tasks sets, is the lane that a task without one is filed in.
local function release_as(counter, limit, failure, retry_message, to_back, run_at, retried_at)
  return {counter = counter, limit = limit, failure = failure, retry_message = retry_message, to_back = to_back,
    run_at = run_at, retried_at = retried_at}
end

-- The one way back into the queue, for stop, retry, leave and the recovery of dead workers. `release`: a release_as.
-- `policy`: the worker_policy of the worker that held the claim. If its cancellation was requested, the claim ends as
-- cancelled. If the queue was cleared since the claim, the task is dropped. Returns given, cancelled, dropped, aside or
-- gone, how many tasks became claimable, and the id of a job that was given back. The caller removes the claim from the
-- worker's set of claims.
local function release_claim(base, claim, release, policy, now)
  local task = read_claim(base, claim)
  local ready = end_if_cancelled(base, claim, task, policy.result_ttl, now)
  if ready then
    return 'cancelled', ready
  end
  if not task then
    return 'gone', end_claim(base, claim, 'gone', nil, nil, now) or 0
  end
  if tonumber(claim) <= cleared_up_to(base) then
    count(base, 'dropped', 1, {task.job})
    return 'dropped', end_claim(base, claim, 'cancelled', nil, policy.result_ttl, now) or 0
  end
  local counter = release.counter
  if counter ~= '' then
    task[counter] = task[counter] + 1
    if task[counter] >= whole_number(task.fields['max_' .. counter], release.limit) then
      return 'aside', move_to_dead_letters(base, claim, task, release.failure, policy, now)
    end
  end
  if release.lane and may_be_filed(base, task) then
    return 'given', file_task(base, claim, task, release.lane, now)
  end
  return 'given', requeue(base, claim, task, release, policy, now)
end

-- Gives claims of `worker` back to the queue, in this order, without counting the attempt. `held_claims`: the set of its claims.
-- `lanes`: the lane of each task, for those that are filed in one (nil: all go back to where they were). Returns the reply: ok, and
-- each claim that was not given back with its status.
local function release_uncounted(base, workers, held_claims, worker, claims, lanes)
  local policy, now, release = worker_policy(base, worker), now_ms(), release_as('')
  local reply, given, ready, ids, held = {'ok'}, 0, 0, {}, {}
  for i, claim in ipairs(claims) do
    local status
    local put = 0
    if redis.call('SREM', held_claims, claim) == 0 then
      status = unheld_status(workers, worker)
    else
      held[#held + 1], release.lane = claim, lanes and lanes[i]
      status, put, ids[#ids + 1] = release_claim(base, claim, release, policy, now)
    end
    ready = ready + put
    if status == 'given' then
      given = given + 1
    else
      reply[#reply + 1] = claim
      reply[#reply + 1] = status
    end
  end
  count(base, 'stopped', given, ids)
  ready = ready + count_members(base)
  wake(base, math.max(ready, free_room(base, held)))
  if ready == 0 then
    wake_for_suspects(base)
  end
  return reply
end

-- True if the claimed `task` may be put into a lane: it is a raw task, or a job that was one and is in no lane. A job of its id that
-- is blocked has to be merged first.
-- LATER: most tasks of lanes are dispatched.
local function may_be_filed(base, task)
  local fields = task.fields
  return not task.job or fields.twin and not fields.lane and redis.call('EXISTS', base .. ':job:' .. task.id) == 0
end

-- Puts the `task` under `claim` at the back of a lane, as a job; a suspect at the front. A raw task is as old as its filing. Returns
-- how many tasks became claimable, and the id of the job.
-- LATER: most tasks of lanes are dispatched.
local function file_task(base, claim, task, lane, now)
  local job, fields = base .. ':job:' .. task.id, {lane = lane, state = 'waiting', queued = claim}
  fields.run_at = task.fields.run_at or digits(now)
  redis.call('DEL', base .. ':claim:' .. claim)
  if task.job then
    redis.call('RENAME', base .. ':active:' .. task.id, job)
    redis.call('HDEL', job, 'claim', 'worker', 'progress', 'message', 'cancel_reason', 'retried_at')
  else
    fields.task, fields.twin, fields.first, fields.last = task.task, redis.sha1hex(task.task), claim, claim
    add_twin(base, fields.twin, task.id)
  end
  write_hash(job, fields)
  return place(base, task.id, now, now, false, task.fields.suspect, lane), task.id
end

-- Merges a `blocked` job into the job that blocked it, whose record had `fields` and which would be due at `run_at`. Each
-- field is merged as the dispatches of the blocked job said. Returns when the job is due then.
local function merge_blocked_job(job, fields, blocked, changes, run_at)
  if blocked.update_data then
    changes.task, changes.meta, changes.scheduled_for = blocked.task, blocked.meta, blocked.scheduled_for
    redis.call('HDEL', job, 'meta', 'scheduled_for')
    if fields.saved_size or blocked.saved_size then
      merge_saved(job, fields, blocked, changes)
    end
  end
  if blocked.update_counts then
    changes.failures, changes.stalls, changes.timeouts, changes.suspect = nil, nil, nil, nil
    changes.error_type, changes.error_message, changes.tries = nil, nil, nil
    redis.call('HDEL', job, 'failures', 'stalls', 'timeouts', 'suspect', 'error_type', 'error_message', 'tries')
  end
  for _, name in ipairs(POLICY) do
    if blocked[name] and (not fields[name] or has_name(blocked.update_policy or '', name)) then
      changes[name] = blocked[name]
    end
  end
  changes.last = blocked.last
  return clamp(run_at, whole_number(blocked.update_low, 0), whole_number(blocked.update_high, NEVER, NEVER))
end

-- Puts a job back into the queue, or among the due jobs. In a strict lane it goes to the front at once, and nothing of the lane
-- starts before it is due. Returns how many tasks became claimable.
local function put_back(base, task, run_at, now, front, suspect)
  local lane = task.fields.lane
  if lane and is_strict(base) then
    redis.call('HSET', base .. ':job:' .. task.id, 'state', 'waiting', 'run_at', digits(run_at))
    return place(base, task.id, now, now, true, suspect, lane)
  end
  return enqueue_job(base, task.id, run_at, now, front, suspect, lane)
end

-- Puts the `task` under `claim` back into the queue, with the counter of this return and the error of its attempt.
-- `release`: a release_as. `policy`: the worker_policy of the worker that held it. A raw task with something to store becomes
-- a job. The field `queued` is the token of its place: a place with a token up to that of the last clearing is in the
-- trash. Returns how many tasks became claimable, and the id of the job, if it is one.
local function requeue(base, claim, task, release, policy, now)
  redis.call('DEL', base .. ':claim:' .. claim)
  local front, run_at, is_counted = not release.to_back, release.run_at or now, release.counter ~= ''
  if not task.job and not is_counted and run_at <= now then
    redis.call(front and 'RPUSH' or 'LPUSH', base, task.item)
    return 1
  end
  local job, changes = base .. ':job:' .. task.id, {queued = claim, started = '1'}
  if is_counted then
    changes[release.counter] = task[release.counter]
  end
  if release.failure then
    local why, message = is_counted and release.failure.reason, release.retry_message or release.failure.error_message
    changes.error_type, changes.error_message = release.failure.error_type, truncated(message)
    changes.tries = add_try(task.fields.tries, claim, now, policy.worker, why or 'retry', changes.error_type, message)
  end
  if release.run_at then
    changes.run_at, changes.retried_at = digits(run_at), release.retried_at
  end
  if task.stalls > 0 and task.stalls >= whole_number(task.fields.max_stalls, policy.max_stalls) - 1 then
    changes.suspect = '1'
  end
  if task.job then
    local blocked = redis.call('SREM', base .. ':blocked', task.id) == 1 and read_hash(job)
    redis.call('RENAME', base .. ':active:' .. task.id, job)
    redis.call('HDEL', job, 'claim', 'worker', 'progress', 'message', 'cancel_reason', 'suspect',
      'retried_at')
    if blocked then
      run_at = merge_blocked_job(job, task.fields, blocked, changes, run_at)
      changes.run_at = digits(run_at)
    end
  else
    changes.task, changes.twin, changes.first, changes.last = task.task, redis.sha1hex(task.task), claim, claim
    add_twin(base, changes.twin, task.id)
  end
  write_hash(job, changes)
  return put_back(base, task, run_at, now, front, changes.suspect), task.id
end

-- Removes the members of a set of claims that can be no claims.
-- LATER: no program of worqr adds others.
local function remove_implausible(held)
  for _, claim in ipairs(redis.call('SMEMBERS', held)) do
    if not string.find(claim, '^%d+$') then
      redis.call('SREM', held, claim)
    end
  end
end

-- Returns up to `limit` of the worker's claims, newest first. If there are more, the order is computed once and stored
-- until all are done. Members that can be no claims are removed from the set, because the server does not sort it with them.
local function newest_claims(base, worker, limit)
  local claims, order = base .. ':claims:' .. worker, base .. ':leaving:' .. worker
  if redis.call('EXISTS', order) == 0 then
    local is_short = redis.call('SCARD', claims) <= limit
    local sorted = is_short and own(redis.pcall('SORT_RO', claims, 'DESC'), 'double')
      or not is_short and own(redis.pcall('SORT', claims, 'STORE', order), 'double')
    if not sorted then
      remove_implausible(claims)
      return newest_claims(base, worker, limit)
    elseif is_short then
      return sorted
    end
  end
  return redis.call('RPOP', order, limit)
end

-- Ends the admission of `worker` and releases up to `limit` of its claims, newest first, which restores the old order.
-- Counter 'stalls' is for the recovery of a dead worker, '' for a worker that leaves. Returns the reply of both scripts.
local function release_all(base, worker, limit, counter)
  local claims = base .. ':claims:' .. worker
  check_types(base)
  check_dead_letter_types(base, worker)
  local policy, now, failure = worker_policy(base, worker), now_ms(), nil
  if counter ~= '' then
    failure = dead_letter_as('failed', 'stalled', 'Stalled',
      'its workers died while it ran, as often as max_stalls allows', '')
  end
  local release = release_as(counter, policy.max_stalls, failure, 'its worker died while it ran')
  local ended, ready, ids = {given = 0, cancelled = 0, dropped = 0, aside = 0, gone = 0}, 0, {}
  local released = {}
  for _, claim in ipairs(newest_claims(base, worker, limit)) do
    if redis.call('SREM', claims, claim) == 1 then
      released[#released + 1] = claim
      local status, put, id = release_claim(base, claim, release, policy, now)
      ended[status], ready, ids[#ids + 1] = ended[status] + 1, ready + put, id
    end
  end
  ready = ready + count_members(base)
  free_room(base, released)
  redis.call('SREM', base .. ':hungry', worker)
  count(base, counter == '' and 'stopped' or 'stalled', ended.given, ids) -- the others were counted when they ended
  local anything_left = startable_items(base) > 0
  wake(base, math.max(ready, anything_left and 1 or 0)) -- the worker may have consumed a wake-up
  if redis.call('EXISTS', claims) == 1 then
    redis.call('HSET', base .. ':workers', worker, LEAVING)
    return {'more', ended.given, ended.cancelled, ended.aside}
  end
  redis.call('HDEL', base .. ':workers', worker)
  redis.call('ZREM', base .. ':result_ttls', worker)
  redis.call('DEL', base .. ':policy:' .. worker, base .. ':leaving:' .. worker)
  forget_declared_limits(base)
  forget_declared_lanes(base)
  return {'ok', ended.given, ended.cancelled, ended.aside}
end
