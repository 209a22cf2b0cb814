-- Claims: how workers take tasks, keep them and end them.

-- A claim of a worker on a task: its fencing token, how it is cancelled and ended, and the ways back into the queue.
-- The item of a claim is in a list of its own, and its token in the worker's set of claims.

local LAST_TOKEN = 9000000000000000 -- the clock in the year 2255. A larger token was never assigned: doubles soon lose digits there

-- Returns the queue's next fencing token, the clock in milliseconds, and the last token (0: none). The token is above the last
-- one and above the clock, so that it never decreases.
local function next_token(base)
  local last = tonumber(redis.call('HGET', base .. ':counts', 'fence')) or 0
  if not (last >= 0 and last <= LAST_TOKEN) then
    last = 0
  end
  local time = redis.call('TIME')
  return math.max(last + 1, time[1] * 1000000 + time[2]), time[1] * 1000 + math.floor(time[2] / 1000), last
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

-- Deletes what is stored under `claim`. Returns false if there is nothing, else how many blocked jobs became claimable, the id,
-- if it is a job, and the item. The last five parameters are those of end_job. The caller removes the claim from the worker's set
-- of claims.
local function end_claim(base, claim, outcome, facts, ttl, now, none_blocked)
  local item = redis.pcall('LPOP', base .. ':claim:' .. claim)
  if not item or item.err then
    own(item)
    return false
  end
  local id = job_id(item)
  return id and end_job(base, id, outcome, facts, ttl, now, none_blocked) or 0, id, item
end

-- Marks `claim` for cancellation and notifies the worker that holds it. A worker with a secret gets a message with a proof on
-- its own channel, and cancels the run at once. Otherwise all workers of the queue get the claim, and the one that holds it asks
-- which of its claims are marked. That is so if the worker is not known (nil), and if the user may not read its secret.
local function request_cancel(base, claim, worker)
  if redis.call('SADD', base .. ':cancelling', claim) == 0 then
    return
  end
  local secret = worker and permitted(redis.pcall('HGET', base .. ':policy:' .. worker, 'secret'))
  if secret then
    redis.pcall('PUBLISH', base .. ':wake:' .. worker, 'c ' .. claim .. ' ' .. redis.sha1hex(secret .. ' ' .. claim))
  else
    redis.pcall('PUBLISH', base .. '_cancel', claim)
  end
end

-- Marks many claims and notifies each worker that holds one of them, once, on the worker's own channel. One message per
-- claim to all workers would block the server for seconds. `marked`: claims and their workers in turn.
local function request_cancels(base, marked)
  if #marked == 2 then
    return request_cancel(base, marked[1], marked[2])
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
-- `limit`: for a task without a limit of its own; the task fails when the counter reaches it. 0: in any case. `failure`: a dead_letter_as,
-- or nil. `retry_message`: stored with a retried task instead of the failure's (nil: that). `to_back`: true for the back of
-- the queue. `run_at`: ms (nil: at once). `retried_at`: ms as text, if run_at is a delay (nil: it is none). The field `lane`,
-- which file_tasks sets, is the lane that a task without one is filed in. The field `suspended_until`, which suspend_task sets, is the
-- time in ms until which the job is suspended; `look_at` when the leader looks at it.
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
    if release.limit == 0 or task[counter] >= whole_number(task.fields['max_' .. counter], release.limit) then
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
local function may_be_filed(base, task)
  local fields = task.fields
  return not task.job or fields.twin and not fields.lane and redis.call('EXISTS', base .. ':job:' .. task.id) == 0
end

-- Puts the `task` under `claim` at the back of a lane, as a job; a suspect at the front. A raw task is as old as its filing. Returns
-- how many tasks became claimable, and the id of the job.
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
local function merge_blocked_job(base, job, fields, blocked, changes, run_at)
  if blocked.update_data then
    changes.task, changes.meta, changes.scheduled_for = blocked.task, blocked.meta, blocked.scheduled_for
    changes.keep = blocked.keep
    redis.call('HDEL', job, 'meta', 'scheduled_for', 'follow')
    changes.follow = blocked.follow
    if fields.saved_size or blocked.saved_size or fields.life or blocked.life then
      merge_saved(job, fields, blocked, changes)
    end
  end
  local dropped = blocked.update_data and fields.follow or not blocked.update_data and blocked.follow
  if dropped then
    keep_follow_ups_of(base, dropped, FOLLOW_UP_EXPIRE)
  end
  if blocked.update_counts then
    changes.failures, changes.stalls, changes.timeouts, changes.suspect, changes.failing_since = nil, nil, nil, nil, nil
    changes.error_type, changes.error_message, changes.tries = nil, nil, nil
    redis.call('HDEL', job, 'failures', 'stalls', 'timeouts', 'suspect', 'error_type', 'error_message', 'tries', 'failing_since')
  end
  for _, name in ipairs(POLICY) do
    if blocked[name] and (not fields[name] or has_name(blocked.update_policy or '', name)) then
      changes[name] = blocked[name]
    end
  end
  changes.last = blocked.last
  return clamp(run_at, whole_number(blocked.update_low, 0), whole_number(blocked.update_high, NEVER, NEVER))
end

-- Moves the tags of a `blocked` job to the record of the job that blocked it, if they are among what it replaces.
local function merge_tags(base, task, blocked, changes, delay)
  local fields = task.fields
  if blocked.tags then
    remove_tags(base, blocked.tags, blocked.first or '', task.id)
  end
  if blocked.update_data and (fields.done or fields.tags or blocked.done or blocked.tags) then
    redis.call('HDEL', base .. ':job:' .. task.id, 'done', 'tags')
    changes.done, changes.tags = blocked.done, blocked.tags
    change_tags(base, task.id, fields, blocked, delay)
  end
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

-- Returns what a return to the queue changes in the record of a task: the counter of this return and the error of its attempt; if it
-- is not counted, the message only; what a suspended job waits for. The parameters are those of requeue.
local function changes_of(claim, task, release, policy, now)
  local changes, is_counted = {queued = claim, started = '1'}, release.counter ~= ''
  if is_counted then
    changes[release.counter] = task[release.counter]
    changes.failing_since = release.failing_since
  end
  if release.failure then
    local failed, message = release.failure, release.retry_message or release.failure.error_message
    local kind, why = is_counted and failed.error_type or '', is_counted and failed.reason or 'retry'
    changes.error_type, changes.error_message = kind, truncated(message)
    if failed.error_type ~= '' then
      changes.tries = add_try(task.fields.tries, claim, now, policy.worker, why, failed.error_type, message)
    end
    changes.earlier = not is_counted and digits(whole_number(task.fields.earlier, 0) + 1) or nil
  end
  if release.suspended_until then
    changes.error_type, changes.error_message = '', truncated(release.retry_message)
    changes.earlier = digits(whole_number(task.fields.earlier, 0) + 1)
  elseif release.run_at then
    changes.run_at, changes.retried_at = digits(release.run_at), release.retried_at
  end
  if task.stalls > 0 and task.stalls >= whole_number(task.fields.max_stalls, policy.max_stalls) - 1 then
    changes.suspect = '1'
  end
  return changes
end

-- Puts the `task` under `claim` back into the queue, or among the suspended jobs, with what changes_of returns.
-- `release`: a release_as. `policy`: the worker_policy of the worker that held it. A raw task with
-- something to store becomes a job. The field `queued` is the token of its place: a place with a token up to that of the last
-- clearing is in the trash. Returns how many tasks became claimable, and the id of the job, if it is one.
local function requeue(base, claim, task, release, policy, now)
  redis.call('DEL', base .. ':claim:' .. claim)
  local front, run_at, is_counted = not release.to_back, release.run_at or now, release.counter ~= ''
  if not task.job and not is_counted and run_at <= now then
    redis.call(front and 'RPUSH' or 'LPUSH', base, task.item)
    return 1
  end
  local job, changes = base .. ':job:' .. task.id, changes_of(claim, task, release, policy, now)
  if task.job then
    local blocked = redis.call('SREM', base .. ':blocked', task.id) == 1 and read_hash(job)
    redis.call('RENAME', base .. ':active:' .. task.id, job)
    redis.call('HDEL', job, 'claim', 'worker', 'progress', 'message', 'cancel_reason', 'suspect',
      'retried_at')
    if blocked then
      run_at = merge_blocked_job(base, job, task.fields, blocked, changes, run_at)
      changes.run_at = digits(run_at)
      merge_tags(base, task, blocked, changes, run_at - now)
    end
  else
    changes.task, changes.twin, changes.first, changes.last = task.task, redis.sha1hex(task.task), claim, claim
    add_twin(base, changes.twin, task.id)
  end
  write_hash(job, changes)
  if release.suspended_until and redis.call('HEXISTS', job, 'open') == 1 then -- not if a blocked job has replaced its payload
    if task.fields.failing_since then -- the time until it is woken is no failing
      redis.call('HDEL', job, 'failing_since')
    end
    return set_suspended(base, task.id, task.fields.lane, release.suspended_until, release.look_at, now), task.id
  end
  return put_back(base, task, run_at, now, front, changes.suspect), task.id
end

-- Removes the members of a set of claims that can be no claims.
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

-- The tries of a task that did not end well: when, for how long, on which worker, and why. People read them; no script decides
-- by them.

local MOST_TRIES = 10
local TRIES_BYTES = 8192

-- Returns the first 500 bytes of a text, without a character that the cut would split.
local function truncated(text)
  return #text <= 500 and text or (string.gsub(string.sub(text, 1, 500), '[\192-\255][\128-\191]*$', ''))
end

-- Returns the field `tries` of a record with one more try: that of `claim` of `worker`, which ends now. It has the last
-- MOST_TRIES, fewer if they would take more than TRIES_BYTES. `kept`: the field so far (nil: none). `why`: failed, retry (it
-- was not counted), timeout, stalled or broken.
local function add_try(kept, claim, now, worker, why, error_type, error_message)
  local read, earlier = pcall(cmsgpack.unpack, kept or '\144')
  local tries = {}
  if read and type(earlier) == 'table' then -- another application may have written anything
    for i = math.max(1, #earlier - MOST_TRIES + 2), #earlier do
      tries[#tries + 1] = earlier[i]
    end
  end
  local ms = math.max(0, now - math.floor(tonumber(claim) / 1000))
  tries[#tries + 1] = {now, ms, worker, why, truncated(error_type), truncated(error_message)}
  local packed = cmsgpack.pack(tries)
  while #packed > TRIES_BYTES and #tries > 1 do
    table.remove(tries, 1)
    packed = cmsgpack.pack(tries)
  end
  return packed
end

-- A start: how a worker takes tasks of the lists into claims, and what a repeated request returns. Whose turn it is among lanes is
-- in lanes.lua.

local MOST_WANTED = 10000 -- tasks: more than any program of worqr asks for

-- Returns the reply to a start that claims nothing: the worker does not serve the queue, or the request is a copy. For any
-- other request: nil, and the claim under which the worker took its last suspect. `admission`: that of the worker (nil:
-- none).
local function repeated_start(base, admission, number)
  if not admission then
    return {'not_serving'}
  end
  local last, first, taken, suspect = string.match(admission, '^(%d+) (%d+) (%d+) (%d+)$')
  last = tonumber(last)
  if last and number > last then
    return nil, suspect
  end
  first, taken = whole_number(first, nil, NEVER), whole_number(taken, nil, MOST_WANTED)
  if not (first and taken) or last > LARGEST then
    return nil, '0' -- another program wrote it
  elseif number < last then
    return {'late'}
  end
  local reply = {'ok', digits(first)}
  for i = 0, taken - 1 do
    local item = own(redis.pcall('LINDEX', base .. ':claim:' .. digits(first + i), 0))
    reply[#reply + 1] = entry_of(base, item) or false
  end
  return reply
end

-- True if the job was to begin before now and never began.
local function is_expired(fields, now)
  local until_ms, after_ms = whole_number(fields.expires_at), whole_number(fields.expires)
  if after_ms then
    until_ms = whole_number(fields.run_at, 0) + after_ms
  end
  return until_ms and now > until_ms and not fields.started
end

-- Moves the last item of the list `source` under `claim` of the worker of the `start`. The caller adds the claim to the worker's set of
-- claims. Returns one of: taken, the entry, its size in bytes and its lane; empty; expired (the job went to the
-- dead-letter queue); skipped, and true if its job was cancelled just now; suspect and its id. A reference is skipped, and
-- removed, if its record is gone, has no task or does not wait there: a job of this id may have been dispatched again, in another
-- lane. A suspect of a lane, whose list is the `source` then, is moved to the suspects instead.
local function claim_one(start, source, claim, of_lane)
  local base, worker, now = start.base, start.worker, start.now
  local held = base .. ':claim:' .. claim
  local item = redis.pcall('RPOPLPUSH', source, held)
  if item and item.err then -- another application's value at the key of a claim that no worker holds yet
    own(item)
    redis.call('DEL', held)
    item = redis.call('RPOPLPUSH', source, held)
  end
  if not item then
    return 'empty'
  end
  local id = job_id(item)
  if not id then
    return 'taken', item, #item
  end
  local job, active = base .. ':job:' .. id, base .. ':active:' .. id
  local kept = own(redis.pcall('HMGET', job, 'state', 'suspect', 'lane', 'open', 'tags', 'last')) or {}
  local elsewhere = (kept[3] or nil) ~= of_lane -- a suspect of a lane waits among the suspects with its place
    and (source ~= base .. ':suspects' or redis.call('HEXISTS', base .. ':lanes:claims', ':' .. id) == 0)
  local gone = kept[1] ~= 'waiting' or elsewhere or redis.call('HEXISTS', job, 'task') == 0
  if gone or kept[5] and cancel_reached(start, id, kept[5], kept[6], of_lane, source == base .. ':suspects' and kept[3]) then
    redis.call('DEL', held)
    return 'skipped', not gone
  elseif of_lane and kept[2] then
    redis.call('RPOPLPUSH', held, base .. ':suspects')
    return 'suspect', id
  end
  redis.call('RENAME', job, active)
  redis.call('HSET', active, 'claim', claim, 'worker', worker, 'state', 'active')
  if kept[4] then
    bind_waits(active, now)
  end
  local entry, fields = entry_of(base, item)
  if is_expired(fields, now) and expire(base, item, id, claim, worker, fields, now) then
    return 'expired'
  end
  notify(base, id, 'active')
  return 'taken', entry, #fields.task + whole_number(fields.saved_size, 0, MOST_KEPT), fields.lane
end

-- Adds the claims of the `start` to `held`, the set of their worker's claims, and to what limits count, if there are limits. Stores
-- the last claim.
local function note_claims(start, held, has_limits)
  local base, claims = start.base, start.mine
  for from = 1, #claims, 1000 do
    redis.call('SADD', held, unpack(claims, from, math.min(from + 999, #claims)))
  end
  if has_limits and #claims > 0 then
    note_starts(base, claims, start.now)
  end
  if start.taken > 0 then
    store_token(base, start.next_claim + start.taken - 1)
    renew_hourly(base, start.last, start.now)
  end
end

-- Returns whether there are limits or a pause, whether there are lanes, whether producers wait for room, how many suspects wait,
-- whether workers wait, and how many jobs are due later or suspended. Many queues have none of these: one question. A key of a wrong type is an
-- error.
local function what_exists(base)
  local paused, limits, lanes, waiters = base .. ':paused', base .. ':limits', base .. ':lanes', base .. ':waiters'
  local suspects, hungry, due, suspended = base .. ':suspects', base .. ':hungry', base .. ':due', base .. ':suspended'
  if redis.call('EXISTS', paused, limits, lanes, waiters, suspects, hungry, due, suspended) == 0 then
    return false, false, false, 0, false, 0
  end
  local waiting, workers_wait = redis.call('LLEN', suspects), redis.call('SCARD', hungry) > 0
  local due_count = redis.call('ZCARD', due) + redis.call('ZCARD', suspended)
  if redis.call('EXISTS', paused, limits, lanes, waiters) == 0 then
    return false, false, false, waiting, workers_wait, due_count
  end
  return redis.call('EXISTS', paused, limits) > 0, redis.call('EXISTS', lanes) == 1, redis.call('EXISTS', waiters) == 1,
    waiting, workers_wait, due_count
end

-- True if the `start` may take one more task. Fields of a start: base, worker, next_claim, now, wanted, room (how
-- many the limits allow), max_skipped, max_bytes; taken (numbers used up), skipped, bytes (of payload), reply, mine (claims).
local function may_take(start)
  return start.taken < start.wanted and #start.mine < start.room and start.skipped < start.max_skipped
    and start.bytes < start.max_bytes
end

-- Returns the word for a start that may take no more, for whose tasks there is so much `room`.
local function why_no_more(base, room)
  return room == 0 and redis.call('EXISTS', base .. ':paused') == 1 and 'resting' or 'limited'
end

-- Takes up to `most` tasks of the list, which is that of a `lane` (nil: of none). Returns the last status of claim_one, how many
-- items were taken from the list, and the id of a suspect. Stops at a suspect of a lane and, where lanes are `strict`, behind a job
-- that has expired or was cancelled, if the next one is not due yet.
local function take(start, list, most, lane, strict)
  local base, reply, mine = start.base, start.reply, start.mine
  local taken, skipped, bytes, room = start.taken, start.skipped, start.bytes, math.min(start.room, #mine + most)
  local status, items, id = 'taken', 0, nil
  while taken < start.wanted and #mine < room and skipped < start.max_skipped and bytes < start.max_bytes do
    local claim = digits(start.next_claim + taken)
    local entry, size, entry_lane
    status, entry, size, entry_lane = claim_one(start, list, claim, lane)
    if status == 'taken' then
      taken, bytes, reply[#reply + 1], mine[#mine + 1] = taken + 1, bytes + size, entry, claim
      if entry_lane and not lane then
        move_place(base, entry_lane, entry[#entry], claim)
      end
    elseif status == 'expired' then
      taken, reply[#reply + 1] = taken + 1, false
    elseif status == 'skipped' then
      skipped = skipped + 1
    elseif status == 'empty' then
      break
    end
    items = items + 1
    if status == 'suspect' then
      id = entry
      break
    elseif strict and (status == 'expired' or status == 'skipped' and entry)
      and (front_due_at(base, lane, list) or 0) > start.now then
      break
    end
  end
  start.taken, start.skipped, start.bytes = taken, skipped, bytes
  return status, items, id
end

-- Takes the next tasks: of the list `source` or, if that is the queue's own list and the queue has lanes, of the lanes by turns.
-- Of the suspects, it takes one. Returns the status as take does.
local function next_tasks(start, source, has_lanes)
  if has_lanes and source == start.base then
    return take_turns(start)
  end
  return (take(start, source, source == start.base and start.wanted or 1))
end

-- What a job keeps across its runs, which belongs to its payload and goes with it as a whole: the bytes that it saved last (the field
-- `saved`, and `saved_number`), the results of its steps (`step:` and the name), their failed tries (`try:`), and of a workflow its
-- life, its waits, their ends, its events, its children and the times of its entries (workflows.lua, children.lua). So does the
-- `value` that a run shows, which is not counted. The field `saved_size` has the bytes of all others, and is missing if
-- there is nothing. `entries` counts what runs have stored; `earlier` the runs that are in no counter.

local MOST_SAVED = 262144
local MOST_KEPT = 1048576
local STEP_BYTES = 1024 -- that a step counts at least, so that no record has more than 1,024 steps
local OF_LIFE = ' saved saved_number saved_size entries earlier life lives_until lifetime open last_failed value began_with rewinds '
local PREFIXES_OF_LIFE = ' step try wait event events refused child end at '
local LARGE_PREFIXES = ' step try event refused child end at '

-- True for a field that belongs to a life.
local function is_of_life(name)
  local prefix = string.match(name, '^(%l+):')
  local names = prefix and PREFIXES_OF_LIFE or OF_LIFE
  return string.find(names, ' ' .. (prefix or name) .. ' ', 1, true) ~= nil
end

-- True for a field that may be large: only a start reads it.
local function is_large_saved(name)
  local prefix = string.match(name, '^(%l+):')
  return name == 'saved' or name == 'value' or prefix and string.find(LARGE_PREFIXES, ' ' .. prefix .. ' ', 1, true) ~= nil
end

-- Returns how many bytes the step or the saved bytes (`step` is empty) count.
local function saved_bytes(step, size)
  return step == '' and size or math.max(STEP_BYTES, #step + size)
end

-- Deletes what was saved from the record `key`.
local function forget_saved(key)
  for _, name in ipairs(redis.call('HKEYS', key)) do
    if is_of_life(name) then
      redis.call('HDEL', key, name)
    end
  end
end

-- Deletes what was saved from the record `key` if it has another payload than `task`, which replaces it: what a run saved belongs
-- to its payload. A new life begins with the dispatch `number`. `lives_until`, `lifetime`: ms as text, if the life has an end.
local function forget_saved_of_other(key, task, number, lives_until, lifetime)
  if redis.call('HGET', key, 'task') ~= task then
    local is_workflow = redis.call('HEXISTS', key, 'life') == 1
    forget_saved(key)
    if is_workflow then
      write_hash(key, {life = number, lives_until = lives_until, lifetime = lifetime})
    end
  end
end

-- Adds what was saved in the record `fields` to the table `kept`.
local function copy_saved(fields, kept)
  for name, value in pairs(fields) do
    if is_of_life(name) then
      kept[name] = value
    end
  end
end

-- Notes in the record `key` that a run has stored an entry. If it has `asked` for all that it found there, this is progress: the job's
-- counters begin anew, and the runs that they counted are added to `earlier`. With the first entry of a life, the deploy of its `worker`.
-- Returns the number of the entry.
local function note_entry(base, worker, key, asked)
  local runs, kept = 0, redis.call('HMGET', key, 'failures', 'stalls', 'timeouts', 'earlier', 'entries')
  local deploy = not kept[5] and own(redis.pcall('HGET', base .. ':policy:' .. worker, 'deploy'))
  if deploy then
    redis.call('HSET', key, 'began_with', deploy)
  end
  local number = whole_number(kept[5], 0) + 1
  redis.call('HSET', key, 'entries', digits(number))
  if asked then
    for i = 1, 4 do
      runs = runs + whole_number(kept[i], 0)
    end
    redis.call('HDEL', key, 'failures', 'stalls', 'timeouts', 'suspect', 'error_type', 'error_message', 'failing_since')
    if runs > 0 then
      redis.call('HSET', key, 'earlier', digits(runs))
    end
  end
  return number
end

-- Returns the field `at:KIND:NAME` of an entry: its number, when it was stored, and how many ms it took; empty: not known.
local function time_of_entry(number, now, took)
  return digits(number) .. ' ' .. digits(now) .. ' ' .. (took and digits(took) or '')
end

-- Chooses what is kept when a `blocked` job replaces the payload of the record `key`, which had `fields`. What a run saved
-- belongs to its payload. Of two that saved under one payload, the one that ran last is kept.
local function merge_saved(key, fields, blocked, changes)
  local is_other = blocked.task ~= fields.task
  if is_other and (fields.saved_size or fields.life) then
    forget_saved(key)
    changes.life = fields.life and blocked.last
  end
  if is_other or not fields.saved_size then
    copy_saved(blocked, changes)
  end
end

-- start_tasks: moves up to n tasks into claims of an admitted worker: a suspect first, one at a time, then lanes by turns. If
-- there are fewer tasks, due jobs are put into the queue, and suspended ones whose time has come. An expired job goes to the dead-letter queue, and its number is used
-- up. If no task is left, or no more may start, the worker joins the waiting workers in the same script. If tasks are left
-- that may start, one more worker is woken. Producers that wait for room are woken, too.
-- ARGV[1] worker id
-- ARGV[2] number of the worker's start request on this queue, counts from 1
-- ARGV[3] wanted tasks, 0: only pass a wake-up on
-- ARGV[4] max_bytes bytes of payload after which no further task is taken
-- ARGV[5] max_skipped references without a record that are skipped at most
-- RETURNS ok first entry... | short first hungry entry... | limited first hungry entry... | resting first hungry | paused | late |
--   not_serving; short: no task is left. limited: a limit allows no more. resting: a pause that ends by itself allows none. In these
--   cases the worker joined the waiting workers; hungry is how many wait now. paused: the queue is paused until it is resumed;
--   claims are first, first + 1, ...; an entry is the payload, or for a job the names and values of its record and its id;
--   false for a claim that is gone
-- RESEND safe: fenced by the number; an equal one gets the same claims again, a lower one nothing
-- FLAGS allow-oom
-- ALWAYS whole_number own digits job_id admission_of repeated_start next_token store_token renew_hourly what_exists entry_of
-- ALWAYS is_expired notify claim_one take next_tasks note_claims may_take add_stale remove_stale count member_changes
-- ALWAYS kept_changes
-- ALWAYS count_members wake
-- OFTEN add_places add_starts add_to check_lane_types clamp drop_idle_lanes enqueue_job file_lane filed_in keep_lane
-- OFTEN lane_length lane_list lane_room lane_rules leave_ring_together limits_of next_lane note_lane_starts note_starts now_ms
-- OFTEN open_lanes parsed_limits place promote push_to_lane read_hash read_rules read_turns room_of room_to_start rule_names
-- OFTEN rules_of settle_visits start_entry startable startable_items starts_within state_at store_turns take_turns turn_number
-- OFTEN turn_text visit_lane visit_main visit_of
local function start_tasks()
  local queue = KEYS[1]
  local worker, number, wanted = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
  local max_bytes, max_skipped = tonumber(ARGV[4]), tonumber(ARGV[5])
  local workers, claims, hungry = queue .. ':workers', queue .. ':claims:' .. worker, queue .. ':hungry'
  local suspects, lanes = queue .. ':suspects', queue .. ':lanes'

  local earlier_reply, suspect = repeated_start(queue, admission_of(workers, worker), number)
  if earlier_reply then
    return earlier_reply
  end
  -- A key of a wrong type is an error before the first write. Keys that only an expired job needs are checked when there is one.
  local has_limits, has_lanes, has_waiters, suspects_wait, workers_wait, due_count = what_exists(queue)
  local left, runs_none = redis.call('LLEN', queue) + suspects_wait, redis.call('SISMEMBER', claims, suspect) == 0
  local first_source = runs_none and (suspects_wait + due_count > 0 or has_lanes) and suspects or queue
  local source, exhausted, promoted = first_source, false, 0
  local next_claim, now, last = next_token(queue)
  local room = not has_limits and wanted or room_to_start(queue, wanted, now)
  if not room then
    redis.call('HSET', workers, worker, digits(number) .. ' 0 0 ' .. suspect)
    return {'paused'}
  end
  if has_lanes then
    check_lane_types(queue)
    open_lanes(queue, max_skipped, now)
  end
  local reply, mine = {'ok', digits(next_claim)}, {}
  local start = {base = queue, worker = worker, next_claim = next_claim, now = now, wanted = wanted, room = room,
    last = last, max_skipped = max_skipped, max_bytes = max_bytes, taken = 0, skipped = 0, bytes = 0, reply = reply, mine = mine}
  while may_take(start) and not exhausted do
    local status = next_tasks(start, source, has_lanes)
    if status == 'empty' and source == queue and due_count > 0 then
      promoted = promote(queue, max_skipped, now)
      left, due_count, source = left + promoted, 0, first_source
      has_lanes = redis.call('EXISTS', lanes) == 1
    elseif status == 'empty' then
      exhausted, source = source == queue, queue
    elseif status == 'suspect' then
      source = first_source
    elseif status == 'taken' and source == suspects then
      suspect, first_source, source = mine[#mine], queue, queue
    end
  end
  local taken, skipped = start.taken, start.skipped
  note_claims(start, claims, has_limits)

  redis.call('HSET', workers, worker, table.concat({digits(number), digits(next_claim), digits(taken), suspect}, ' '))
  count(queue, 'claimed', taken, nil, nil, reply)
  left = has_lanes and startable_items(queue) or left - taken - skipped
  remove_stale(queue, skipped, left + (has_lanes and redis.call('EXISTS', queue .. ':lanes:names') or 0))
  if has_waiters then
    wake_producers(queue)
  end
  -- Tasks are left although the lists were read to the end: these are suspects, and this worker runs one. Others may take them.
  local wakes = math.min(left, exhausted and math.max(promoted, 1) or 1)
  if workers_wait and (wakes > 0 or not exhausted) then
    redis.call('SREM', hungry, worker)
    wake(queue, wakes)
  end
  if exhausted or (taken < wanted and #mine >= room) then
    redis.call('SADD', hungry, worker)
    reply[1] = exhausted and 'short' or why_no_more(queue, room)
    table.insert(reply, 3, redis.call('SCARD', hungry))
  end
  wake(queue, count_members(queue)) -- of jobs that have expired
  return reply
end

-- file_tasks: puts claims of tasks that are in no lane at the back of their lanes; each is a job then. The attempt is not counted.
-- ARGV[1] worker id
-- ARGV[2..] filed claim id and the name of its lane, in turn
-- RETURNS ok [claim status]...: only those that are in no lane now: cancelled, dropped (the queue was deleted), gone, mine, lost
-- RESEND safe: fenced by the claim
-- GROUP seldom
-- FLAGS allow-oom
local function file_tasks()
  local queue = KEYS[1]
  local worker = ARGV[1]
  local workers, claims = queue .. ':workers', queue .. ':claims:' .. worker
  local named, lanes = {}, {}
  for i = 2, #ARGV, 2 do
    local filed, lane = ARGV[i], ARGV[i + 1]
    if not is_lane(lane) then
      return redis.error_reply('ERR a lane has a name of 1 to 200 bytes of UTF-8 without control characters')
    end
    named[#named + 1], lanes[#lanes + 1] = filed, lane
  end

  check_types(queue)
  check_lane_types(queue)
  return release_uncounted(queue, workers, claims, worker, named, lanes)
end

-- Returns what the ends of runs need to know of a queue that may have jobs that are blocked by runs, suspects, requests to cancel, or
-- runs that limits or lanes count: whether it has no blocked jobs, whether suspects and workers wait, whether claims are marked, and
-- true. A key of a wrong type is an error.
local function what_ends_need(base)
  local none_blocked = redis.call('SCARD', base .. ':blocked') == 0
  local suspects_wait = redis.call('LLEN', base .. ':suspects') > 0 and redis.call('SCARD', base .. ':hungry') > 0
  if suspects_wait or not none_blocked then
    check_types(base)
  end
  return none_blocked, suspects_wait, redis.call('SCARD', base .. ':cancelling') > 0, true
end

-- Puts a `worker` among those that wait, and returns the `reply` that says so, and how many wait now. Returns nil if a task is left,
-- if there is anything for which a start does more than take the next one, or if the `number` is not that of the worker's last start.
local function rejoin(base, worker, number, reply)
  local due, suspended = base .. ':due', base .. ':suspended'
  local others = {base, base .. ':paused', base .. ':limits', base .. ':lanes', base .. ':waiters', base .. ':suspects'}
  if redis.call('EXISTS', due, suspended, unpack(others)) > 0 then
    local now = digits(now_ms())
    if redis.call('EXISTS', unpack(others)) > 0 or own(redis.pcall('ZCOUNT', due, '-inf', now)) ~= 0
      or own(redis.pcall('ZCOUNT', suspended, '-inf', now)) ~= 0 then
      return nil
    end
  end
  local admission = own(redis.pcall('HGET', base .. ':workers', worker))
  if admission and string.match(admission, '^%d+') == number and own(redis.pcall('SADD', base .. ':hungry', worker)) then
    reply[1] = 'waits'
    table.insert(reply, 2, redis.call('SCARD', base .. ':hungry'))
    return reply
  end
  return nil
end

-- finish_tasks: ends claims as finished, keeps the results of jobs, puts blocked jobs into the queue. A claim with a cancel
-- mark ends as cancelled instead, without a result. With `rejoins`, the worker joins the waiting workers in the same script, if no
-- task is left and nothing makes starting one more than taking the next.
-- ARGV[1] worker id
-- ARGV[2] rejoins number of the worker's last start on this queue: a task was handed to it since, and it has room; empty: it joins by
--   a start
-- ARGV[3] results among what follows
-- ARGV[4..] ended first, for each result, claim id, kind (bytes, json, none) and value; then the ids of all ended claims
-- RETURNS ok [claim status]... | waits hungry [claim status]...: only those that did not end as finished: cancelled, mine (settled
--   before by this worker, a resend), lost (the worker counted as dead: the task runs elsewhere). waits: the worker joined the
--   waiting workers; hungry is how many wait now
-- RESEND safe: fenced by the claim; a worker that joins again, before its next start, may be woken in vain
-- FLAGS allow-oom
-- ALWAYS whole_number own digits job_id notify copy_attempts store_attempts retire_result store_result end_job end_claim count
-- ALWAYS member_changes kept_changes count_members wake
-- OFTEN rejoin add_places drop_idle_lanes free_counted free_places free_room lane_rules now_ms parsed_limits read_hash read_rules
-- OFTEN rules_of startable_items what_ends_need
local function finish_tasks()
  local queue = KEYS[1]
  local worker, rejoins, results = ARGV[1], ARGV[2], tonumber(ARGV[3])
  local workers, claims, policy = queue .. ':workers', queue .. ':claims:' .. worker, queue .. ':policy:' .. worker

  -- A key of a wrong type is an error before the first write. Keys for blocked jobs and suspects are checked if there are some.
  redis.call('HLEN', queue .. ':counts')
  local none_blocked, suspects_wait, anything_marked, any_counted = true, false, false, false
  if redis.call('EXISTS', queue .. ':blocked', queue .. ':suspects', queue .. ':cancelling', queue .. ':limited',
    queue .. ':lanes:claims') > 0 then
    none_blocked, suspects_wait, anything_marked, any_counted = what_ends_need(queue)
  end
  local unheld, no_result = nil, {'kind', 'none', 'value', ''}
  local ttl, now = whole_number(redis.call('HGET', policy, 'result_ttl'), 0), not none_blocked and now_ms()
  local subscribers = redis.pcall('PUBSUB', 'NUMSUB', queue .. ':events', queue .. ':event_ends')
  local ids = subscribers[2] and subscribers[2] > 0 and {}
  local ends = ids and {} or nil

  local results_of = {}
  for i = 4, 3 + 3 * results, 3 do
    local ended, kind, value = ARGV[i], ARGV[i + 1], ARGV[i + 2]
    results_of[ended] = {'kind', kind, 'value', value}
  end

  -- One call for many claims where that is possible: calling commands one by one takes most of a script's time.
  local reply, finished, ready, freed = {'ok'}, 0, 0, 0
  for from = 4 + 3 * results, #ARGV, 1000 do
    local named = {}
    for i = from, math.min(from + 999, #ARGV) do
      local ended = ARGV[i]
      named[#named + 1] = ended
    end
    local held = redis.call('SMISMEMBER', claims, unpack(named))
    unheld = unheld or string.find(table.concat(held), '0') and unheld_status(workers, worker)
    for i, claim in ipairs(named) do
      local status, put, id, item = 'finished', nil, nil, nil
      if held[i] == 1 then
        status = anything_marked and take_cancel_request(queue, claim) and 'cancelled' or status
        put, id, item = end_claim(queue, claim, status, results_of[claim] or no_result, ttl, now, none_blocked)
        if status == 'cancelled' then
          count(queue, 'cancelled', 1, {id})
        end
        ready = ready + (put or 0)
      end
      if held[i] == 0 or not put and status == 'finished' then
        unheld = unheld or unheld_status(workers, worker)
        status = unheld
      end
      if status == 'finished' then
        finished = finished + 1
        if ids then
          ids[#ids + 1] = id
          ends[#ends + 1] = {worker, id or false, item, results_of[claim] or no_result}
        end
      else
        reply[#reply + 1] = claim
        reply[#reply + 1] = status
      end
    end
    redis.call('SREM', claims, unpack(named)) -- last: a claim whose end was an error, such as a missing right, is still held
    freed = freed + (any_counted and free_room(queue, named, held) or 0)
  end
  count(queue, 'finished', finished, ids, subscribers, nil, ends)
  ready = ready + count_members(queue)
  wake(queue, math.max(ready, freed, suspects_wait and 1 or 0))
  return rejoins ~= '' and rejoin(queue, worker, rejoins, reply) or reply
end

-- stop_tasks: gives claims back to the front of the queue in their old order; the attempt is not counted.
-- ARGV[1] worker id
-- ARGV[2..] stopped claim ids, in any order
-- RETURNS ok [claim status]...: only those that were not given back: cancelled, dropped (the queue was deleted), gone, mine,
--   lost
-- RESEND safe: fenced by the claim
-- GROUP seldom
-- FLAGS allow-oom
local function stop_tasks()
  local queue = KEYS[1]
  local worker = ARGV[1]
  local workers, claims = queue .. ':workers', queue .. ':claims:' .. worker
  local stopped_claims = {}
  for i = 2, #ARGV do
    local stopped = ARGV[i]
    stopped_claims[#stopped_claims + 1] = stopped
  end
  table.sort(stopped_claims, function(a, b) return tonumber(a) > tonumber(b) end)

  check_types(queue)
  return release_uncounted(queue, workers, claims, worker, stopped_claims)
end

-- retry_task: ends a claim and retries its task: the task goes to the back of the queue, now or when it is due. It becomes
-- a job with its counters. At the limit of the counter it goes to the dead-letter queue as failed.
-- ARGV[1] worker id
-- ARGV[2] claim id
-- ARGV[3] counter failures, stalls (its process died), timeouts, or empty: none is counted
-- ARGV[4] limit of that counter, for a job that has none of its own; the task fails when it is reached; 0: in any case
-- ARGV[5] delay ms until it is due, - if run_at says
-- ARGV[6] run_at ms since 1970 when it is due, - if delay says
-- ARGV[7] error_type text; empty: it is no error that is not counted, and the message says what the job waits for
-- ARGV[8] error_message text
-- ARGV[9] error_traceback text
-- ARGV[10] error_fields JSON, empty: none
-- ARGV[11] pause ms for which the queue, or the lane of the task, is paused, with the error as the reason; the task goes to the front, uncounted; - for none
-- ARGV[12] since ms since 1970 when the first run that failed has begun, for the record; - for none
-- RETURNS given | aside | cancelled | dropped (the queue was deleted) | gone | mine | lost
-- RESEND safe: fenced by the claim
-- GROUP seldom
-- FLAGS allow-oom
local function retry_task()
  local queue = KEYS[1]
  local worker, claim, counter, limit = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
  local delay, run_at = tonumber(ARGV[5]), tonumber(ARGV[6])
  local error_type, error_message, error_traceback, error_fields = ARGV[7], ARGV[8], ARGV[9], ARGV[10]
  local pause, since = tonumber(ARGV[11]), ARGV[12]
  local workers, claims = queue .. ':workers', queue .. ':claims:' .. worker

  check_types(queue)
  check_dead_letter_types(queue, worker)
  if redis.call('SREM', claims, claim) == 0 then
    return {unheld_status(workers, worker)}
  end
  local policy, now = worker_policy(queue, worker), now_ms()
  local reason = ({stalls = 'stalled', timeouts = 'timeout'})[counter] or 'failed'
  local failure = dead_letter_as('failed', reason, error_type, error_message, error_traceback, error_fields)
  local due_at, retried_at = run_at and math.min(run_at, LATEST), nil
  if not run_at then
    due_at, retried_at = delay > 0 and math.min(now + delay, LATEST) or nil, digits(now)
  end
  local release = release_as(counter, limit, failure, nil, true, due_at, retried_at)
  release.failing_since = is_digits(since) and since or nil
  if pause then
    release = release_as('')
    local lane = redis.call('HGET', queue .. ':lanes:claims', claim)
    if lane then
      pause_lane_for(queue, lane, error_message, pause, now)
    elseif pause_for(queue, error_message, pause) then
      count(queue, 'paused', 1)
    end
  end
  local status, ready, id = release_claim(queue, claim, release, policy, now)
  if counter == 'timeouts' and (status == 'given' or status == 'aside') then
    tally(queue, 'timed_out', 1)
  end
  if status == 'given' then
    count(queue, counter == 'stalls' and 'stalled' or 'retried', 1, {id})
  end
  wake(queue, math.max(ready + count_members(queue), free_room(queue, {claim})))
  wake_for_suspects(queue)
  return {status}
end

-- fail_task: ends a claim for good: its task goes to the dead-letter queue as failed or broken. Failed ones are capped,
-- broken ones are kept until they are dropped or retried. The failure handler, if one is registered, gets its job.
-- ARGV[1] worker id
-- ARGV[2] claim id
-- ARGV[3] kind failed or broken
-- ARGV[4] error_type text
-- ARGV[5] error_message text
-- ARGV[6] error_traceback text
-- ARGV[7] error_fields JSON, empty: none
-- RETURNS aside | cancelled | gone | mine | lost
-- RESEND safe: fenced by the claim
-- GROUP seldom
-- FLAGS allow-oom
local function fail_task()
  local queue = KEYS[1]
  local worker, claim, kind = ARGV[1], ARGV[2], ARGV[3]
  local error_type, error_message, error_traceback, error_fields = ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  local workers, claims = queue .. ':workers', queue .. ':claims:' .. worker

  check_types(queue)
  check_dead_letter_types(queue, worker)
  if redis.call('SREM', claims, claim) == 0 then
    return {unheld_status(workers, worker)}
  end
  local task, policy, now = read_claim(queue, claim), worker_policy(queue, worker), now_ms()
  local failure = dead_letter_as(kind, kind, error_type, error_message, error_traceback, error_fields)
  local status, ready = 'cancelled', end_if_cancelled(queue, claim, task, policy.result_ttl, now)
  if not ready and task then
    if kind == 'failed' then
      task.failures = task.failures + 1
    end
    status, ready = 'aside', move_to_dead_letters(queue, claim, task, failure, policy, now)
  elseif not ready then
    status, ready = 'gone', end_claim(queue, claim, 'gone', nil, nil, now) or 0
  end
  wake(queue, math.max(ready + count_members(queue), free_room(queue, {claim})))
  wake_for_suspects(queue)
  return {status}
end

-- note_progress: stores the progress, messages and values of running tasks. A raw task with progress becomes a job.
-- ARGV[1] worker id
-- ARGV[2..] said claim id, progress (a number as text, empty: none), message, and value (its encoding, a space and the encoded value;
--   empty: it stays), in turn
-- RETURNS ok noted
-- RESEND safe: fenced by the claim; the same is noted again
local function note_progress()
  local queue = KEYS[1]
  local worker = ARGV[1]
  local claims = queue .. ':claims:' .. worker

  local noted = 0
  for i = 2, #ARGV, 4 do
    local said, done, message, value = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
    local record = redis.call('SISMEMBER', claims, said) == 1 and read_claim(queue, said)
    if record then
      local active = queue .. ':active:' .. record.id
      if not record.job then
        become_job(queue, worker, said, record)
      end
      redis.call('HSET', active, 'progress', done, 'message', message)
      if value ~= '' then
        redis.call('HSETNX', active, 'saved_size', '0')
        redis.call('HSET', active, 'value', value)
      end
      notify(queue, record.id, 'progress')
      noted = noted + 1
    end
  end
  return {'ok', noted}
end

-- save_state: stores what a run keeps for later runs of its job: bytes, or the result of a step. A raw task that saves becomes
-- a job.
-- ARGV[1] worker id
-- ARGV[2] claim id
-- ARGV[3] number of the save, higher than that of the save before it; of a step 0, for a failed try of it the number of the try,
--   and 1 to replace what the step @errors has
-- ARGV[4] step its name; empty: bytes are saved
-- ARGV[5] value the bytes, or the kind of the step's result, a space and its value; of a try how it failed
-- ARGV[6] progress 1: the run has asked for all entries that it found; if the step is new, the counters of the job begin anew. Of bytes: they
--   are others than those that the run has found
-- ARGV[7] took ms that the step of a workflow took: the job is one from now on; empty: another job, or not known
-- RETURNS ok size | full size | lost: size is how many bytes the job keeps, or would keep
-- RESEND safe: fenced by the claim; a number that is not higher than the stored one changes nothing, and a step is stored once,
--   or replaced by itself
-- FLAGS allow-oom
local function save_state()
  local queue = KEYS[1]
  local worker, claim, number, step, value = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
  local progress, took = ARGV[6] == '1', ARGV[7]
  local claims = queue .. ':claims:' .. worker

  local held = redis.call('SISMEMBER', claims, claim) == 1
  local item = held and own(redis.pcall('LINDEX', queue .. ':claim:' .. claim, 0))
  if not item then
    return {'lost'}
  end
  local id, replaces = job_id(item), number == 1 and step == '@errors'
  local is_try = step ~= '' and number > 0 and not replaces
  local field = step == '' and 'saved' or (is_try and 'try:' or 'step:') .. step
  value = is_try and digits(number) .. ' ' .. value or value
  local task = claimed_task(queue, item, id, claim, {task = item})
  local active = queue .. ':active:' .. task.id
  local size, before, is_workflow, kept = 0, 0, took ~= '', {}
  if id then
    kept = own(redis.pcall('HMGET', active, 'claim', 'saved_size', 'saved_number', 'life', 'try:' .. step, 'first')) or {}
    if kept[1] ~= claim then
      return {'lost'}
    end
    size, is_workflow = whole_number(kept[2], 0, 2 * MOST_KEPT), kept[4] or is_workflow
    before = redis.call('HSTRLEN', active, step == '' and field or 'step:' .. step)
    local tried = kept[5] and tonumber(string.match(kept[5], '^%d+')) or 0
    if step == '' and number <= whole_number(kept[3], 0) or step ~= '' and before > 0 and not replaces
      or is_try and number <= tried then
      return {'ok', size}
    elseif step ~= '' and not replaces then -- what is stored of its failed tries goes with its result
      before = kept[5] and #kept[5] or 0
    end
    before = before > 0 and saved_bytes(step, before) or 0
  end
  size = math.max(0, size + saved_bytes(step, #value) - before)
  if size > MOST_KEPT or step == '' and #value > MOST_SAVED then
    return {'full', size}
  end
  if not id then
    become_job(queue, worker, claim, task)
  end
  redis.call('HSET', active, field, value, 'saved_size', size)
  if is_workflow and not kept[4] then
    redis.call('HSET', active, 'life', kept[6] or claim)
  end
  if step == '' then
    redis.call('HSET', active, 'saved_number', digits(number))
    if progress then
      note_entry(queue, worker, active, true)
    end
  elseif not is_try and not replaces then
    if before > 0 then
      redis.call('HDEL', active, 'try:' .. step)
    end
    local entry = (is_workflow or progress) and note_entry(queue, worker, active, progress)
    if is_workflow then
      redis.call('HSET', active, 'at:step:' .. step, time_of_entry(entry, now_ms(), whole_number(took, nil, LATEST)))
    end
    if is_workflow and string.sub(value, 1, 7) == 'failed ' then -- a put-back drops it if nothing is stored after it
      redis.call('HSET', active, 'last_failed', redis.call('HGET', active, 'entries') .. ' ' .. step)
    end
  end
  return {'ok', size}
end

-- reconcile: returns which of a worker's claims are marked for cancellation, and which of the claims it names are gone.
-- ARGV[1] worker id
-- ARGV[2..] named claim ids, after a reconnect: all claims that the worker counts as its own
-- RETURNS ok count marked... gone... (count of the marked) | not_serving
-- RESEND safe: it only reads
-- FLAGS no-writes
local function reconcile()
  local queue = KEYS[1]
  local worker = ARGV[1]
  local workers, claims, cancelling = queue .. ':workers', queue .. ':claims:' .. worker, queue .. ':cancelling'

  if not admission_of(workers, worker) then
    return {'not_serving'}
  end
  local reply = {'ok', 0}
  if redis.call('SCARD', cancelling) > 0 then
    for _, claim in ipairs(redis.call('SINTER', claims, cancelling)) do
      reply[#reply + 1] = string.find(claim, '^%d+$') and claim or nil
    end
    reply[2] = #reply - 2
  end
  for i = 2, #ARGV do
    local named = ARGV[i]
    if redis.call('SISMEMBER', claims, named) == 0 then
      reply[#reply + 1] = named
    end
  end
  return reply
end

-- list_own_claims: returns the claims of a queue that a worker holds, the oldest first.
-- ARGV[1] worker id
-- ARGV[2] limit claims
-- RETURNS ok claim... | not_serving
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_own_claims()
  local queue = KEYS[1]
  local worker, limit = ARGV[1], tonumber(ARGV[2])
  local workers, claims = queue .. ':workers', queue .. ':claims:' .. worker

  if not admission_of(workers, worker) then
    return {'not_serving'}
  end
  local reply = claims_in(claims, limit)
  table.insert(reply, 1, 'ok')
  return reply
end

-- list_running: the longest-running tasks of a queue, among the claims of some of its workers, in the order of worker ids; also
-- of workers that leave. Together, the pages of all workers have the longest-running tasks of the queue.
-- ARGV[1] limit claims
-- ARGV[2] max_bytes bytes of payload of jobs that are read
-- ARGV[3] after_worker the last worker of the page before, empty for the first page
-- ARGV[4] after_claim only claims after this one; 0: all
-- ARGV[5] before_claim only claims before this one; 0: all
-- ARGV[6] most_workers whose claims are looked at in one call
-- ARGV[7] budget claims to look at in one call; those of the first worker may be more
-- ARGV[8] only worker whose claims count; empty for all
-- RETURNS ok worker entry... | more worker entry... (call again after this worker); each is claim worker cancelling summary:
--   cancelling is 1 if the run is to be cancelled, a summary is as `summarize` returns it
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_running()
  local queue = KEYS[1]
  local limit, max_bytes, after_worker, after_claim = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
  local before_claim, most_workers, budget, only = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]
  local workers, cancelling = queue .. ':workers', queue .. ':cancelling'

  local holders = only == '' and (own(redis.pcall('HKEYS', workers)) or {}) or {only}
  local found, looked, reply = {}, 0, {'ok', after_worker}
  table.sort(holders)
  for _, worker in ipairs(holders) do
    if worker > after_worker then
      local held = queue .. ':claims:' .. worker
      local claims = own(redis.pcall('SCARD', held)) or 0
      if most_workers == 0 or looked > 0 and looked + claims > budget then
        reply[1] = 'more'
        break
      end
      local oldest = claims > 0 and claims_in(held, after_claim == 0 and limit or nil) or {}
      for _, claim in ipairs(oldest) do
        if tonumber(claim) > after_claim and (before_claim == 0 or tonumber(claim) < before_claim) then
          found[#found + 1] = {claim, worker}
        end
      end
      most_workers, looked, reply[2] = most_workers - 1, looked + claims, worker
    end
  end

  table.sort(found, function(one, other) return tonumber(one[1]) < tonumber(other[1]) end)
  local any_cancelled, room = (own(redis.pcall('SCARD', cancelling)) or 0) > 0, {left = max_bytes}
  for i = 1, math.min(limit, #found) do
    local claim, worker = found[i][1], found[i][2]
    local item = own(redis.pcall('LINDEX', queue .. ':claim:' .. claim, 0)) or ''
    local is_cancelled = any_cancelled and redis.call('SISMEMBER', cancelling, claim) or 0
    reply[#reply + 1] = {claim, worker, is_cancelled, summarize(queue, 'active', item, room)}
  end
  return reply
end

-- list_marks: returns which of these claims are still marked for cancellation; the others have been settled.
-- ARGV[1..] named claim ids
-- RETURNS ok claim...
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_marks()
  local queue = KEYS[1]
  local cancelling = queue .. ':cancelling'

  local reply = {'ok'}
  for i = 1, #ARGV do
    local named = ARGV[i]
    if (own(redis.pcall('SISMEMBER', cancelling, named)) or 0) == 1 then
      reply[#reply + 1] = named
    end
  end
  return reply
end

-- cancel_claims: cancels running tasks by their claims, which tasks without an id have, too: they are marked and their workers
-- notified. A claim that has ended is left out.
-- ARGV[4] reason text for callers that wait for a result
-- ARGV[5..] named claims, 1000 at most
-- RETURNS ok claim...: those that are marked | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- FLAGS allow-oom
local function cancel_claims()
  local queue = KEYS[1]
  local reason = ARGV[4]
  local cancelling = queue .. ':cancelling'

  check_types(queue)
  local holders, reply = claim_holders(queue), {'ok'}
  for i = 5, #ARGV do
    local named = ARGV[i]
    local item = own(redis.pcall('LINDEX', queue .. ':claim:' .. named, 0))
    local id = item and job_id(item)
    if id then
      store_cancel_reason(queue, id, reason)
    end
    reply[#reply + 1] = item and named or nil
  end
  if #reply == 2 then
    request_cancel(queue, reply[2])
  elseif #reply > 2 then
    redis.call('SADD', cancelling, unpack(reply, 2))
    for _, worker in ipairs(holders) do -- which of them holds a task without an id is not stored
      if redis.call('SCARD', queue .. ':claims:' .. worker) > 0 then
        redis.pcall('PUBLISH', queue .. ':wake:' .. worker, 'c')
      end
    end
  end
  return reply
end
