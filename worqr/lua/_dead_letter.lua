-- The dead-letter queue: its records, how a task gets there, and the job of the failure handler. Its keys are named
-- `aside`.

-- Says how a task fails. `kind` names the list of its record: failed or broken. `reason` is a word for programs, the errors
-- are for people. `error_fields`: JSON (empty or nil: none).
local function dead_letter_as(kind, reason, error_type, error_message, error_traceback, error_fields)
  return {kind = kind, reason = reason, error_type = error_type, error_message = error_message,
    error_traceback = error_traceback, error_fields = error_fields ~= '' and error_fields or nil}
end

-- Like check_types, for the other keys used when a task of `worker` goes to the dead-letter queue, and for its failure
-- handler's queue.
local function check_dead_letter_types(base, worker)
  local failures = base .. '-fail'
  redis.call('HLEN', base .. ':policy:' .. worker)
  redis.call('LLEN', failures)
  redis.call('HLEN', failures .. ':counts')
  redis.call('SCARD', failures .. ':hungry')
end

-- Returns the dead-letter record at the key `aside` as names and values, and how many bytes of payload were read for it.
-- What the job saved is left out. `size`: of the payload. `head`: how many bytes of a larger payload are returned (-1: all of
-- it). A hash field can only be read whole, and a larger payload than `room` is returned as empty.
local function dead_letter_entry(aside, size, head, room)
  local is_whole, has_saved = head < 0 or size <= head, own(redis.pcall('HEXISTS', aside, 'saved_size')) == 1
  if is_whole and not has_saved then
    return own(redis.pcall('HGETALL', aside)) or {}, size
  end
  local record, readable = {}, is_whole or size <= room
  for _, name in ipairs(redis.call('HKEYS', aside)) do
    if name == 'task' then
      local task = readable and redis.call('HGET', aside, name) or ''
      record[#record + 1], record[#record + 2] = name, is_whole and task or string.sub(task, 1, head)
    elseif not is_large_saved(name) then
      record[#record + 1], record[#record + 2] = name, redis.call('HGET', aside, name)
    end
  end
  return record, readable and size or 0
end

-- Deletes the dead-letter record under `claim`. The records of one id are linked to their neighbours, and the index has the
-- newest of them. So each can be deleted without a search.
local function delete_dead_letter(base, claim)
  local aside = base .. ':aside:'
  local kept = own(redis.pcall('HMGET', aside .. claim, 'id', 'older', 'newer')) or {}
  local id, older, newer = kept[1], kept[2], kept[3]
  if older then
    set_field(aside .. older, 'newer', newer)
  end
  if newer then
    set_field(aside .. newer, 'older', older)
  elseif id then
    set_field(base .. ':aside', id, older)
  end
  redis.call('DEL', aside .. claim)
end

-- Writes the record `facts` under `claim` and lists it under `kind`, if it is to be kept. `task`: a claimed_task. `keep`:
-- how many failed tasks are kept; the oldest records above it are deleted, at most 100.
local function store_dead_letter(base, claim, task, facts, kind, keep)
  local aside, list = base .. ':aside:' .. claim, base .. ':' .. kind
  if kind == 'broken' or keep > 0 then
    if task.job then
      redis.call('RENAME', base .. ':active:' .. task.id, aside)
      redis.call('HDEL', aside, 'claim', 'state', 'queued', 'suspect', 'cancel_reason')
    end
    facts.task, facts.older = task.task, redis.call('HGET', base .. ':aside', task.id) or nil
    if facts.older then
      set_field(base .. ':aside:' .. facts.older, 'newer', claim)
    end
    write_hash(aside, facts)
    redis.call('HSET', base .. ':aside', task.id, claim)
    redis.call('ZADD', list, facts.at, claim)
  end
  if kind == 'failed' then
    local over = math.min(redis.call('ZCARD', list) - keep, 100)
    if over > 0 then
      local popped = redis.call('ZPOPMIN', list, over)
      for i = 1, #popped, 2 do
        delete_dead_letter(base, popped[i])
      end
    end
  end
end

-- Enqueues the job of the queue's failure handler: the unchanged payload, and how the task failed.
local function enqueue_failure_job(base, claim, task, facts)
  local failures = base .. '-fail'
  local id, token = new_id(failures, 'f' .. claim), next_token(failures)
  store_token(failures, token)
  local dispatch = digits(token)
  write_hash(failures .. ':job:' .. id, {task = task, failed = cmsgpack.pack(facts), run_at = facts.at,
    queued = dispatch, first = dispatch, last = dispatch})
  enqueue_job(failures, id, 0, 0)
  count(failures, 'enqueued', 1, {id})
  wake(failures, 1)
end

-- Stores the result of a job that failed. `ttl`: ms for which it is kept if the job does not say.
local function store_failure(base, task, failure, ttl)
  local error = {'error_type', failure.error_type, 'error_message', failure.error_message, 'error_traceback',
    failure.error_traceback}
  if failure.error_fields then
    error[7], error[8] = 'error_fields', failure.error_fields
  end
  local fields = task.fields
  ttl = tonumber(fields.result_ttl) or ttl
  local result = store_result(base, task.id, fields.first, fields.last, ttl, 'failed', error)
  if result then
    local tries = {task.failures, task.stalls, task.timeouts, fields.progress or '', fields.message or ''}
    store_attempts(result, tries, failure.kind == 'broken' and 1 or 0)
  end
end

-- Ends `claim` by moving its `task` to the dead-letter queue, and enqueues the failure handler's job in the same step.
-- `task`: a claimed_task. `failure`: a dead_letter_as. `policy`: the worker_policy of the worker that held the claim.
-- Returns how many blocked jobs became claimable.
local function move_to_dead_letters(base, claim, task, failure, policy, now)
  local facts = {id = task.id, reason = failure.reason, error_type = failure.error_type,
    error_message = failure.error_message, error_traceback = failure.error_traceback,
    error_fields = failure.error_fields, failures = task.failures, stalls = task.stalls, timeouts = task.timeouts,
    worker = policy.worker, at = digits(now), meta = task.fields.meta}
  if policy.on_failure then
    enqueue_failure_job(base, claim, task.task, facts)
  end
  if failure.reason == 'expired' then
    tally(base, 'expired', 1)
  else
    facts.tries = add_try(task.fields.tries, claim, now, policy.worker, failure.reason, failure.error_type,
      failure.error_message)
  end
  store_dead_letter(base, claim, task, facts, failure.kind, policy.keep_failed)
  if task.fields.twin then
    remove_twin(base, task.fields.twin, task.id)
  end
  if task.fields.batch then
    note_member(task.fields.batch, 'failed', task.id)
  end
  redis.call('DEL', base .. ':active:' .. task.id, base .. ':claim:' .. claim)
  count(base, failure.kind, 1, {task.id}, nil, nil,
    {{policy.worker, task.job or false, task.task, false, failure.error_type, failure.error_message}})
  if not task.job then
    return 0
  end
  store_failure(base, task, failure, policy.result_ttl)
  return unblock(base, task.id, now)
end

-- Moves the claimed job `id`, which was to begin before now, to the dead-letter queue. Returns false if a key has a foreign
-- type: an error in the middle of the move would lose the task.
-- LATER: few jobs expire.
local function expire(base, item, id, claim, worker, fields, now)
  local can_move = pcall(function()
    check_types(base)
    check_dead_letter_types(base, worker)
  end)
  if not can_move then
    return false
  end
  local failure = dead_letter_as('failed', 'expired', 'Expired', 'it was not started before it expired', '')
  local task = claimed_task(base, item, id, claim, fields)
  move_to_dead_letters(base, claim, task, failure, worker_policy(base, worker), now)
  return true
end

-- Returns the key of the dead-letter record of the job `id`, dispatch `number` (0: the newest); nil if there is none.
-- `stem` is the prefix of such keys. Reads the newest 100 records of the id.
local function find_dead_letter(dead_letter_index, stem, id, number)
  local claim = redis.call('HGET', dead_letter_index, id)
  for _ = 1, 100 do
    local kept = claim and redis.call('HMGET', stem .. claim, 'task', 'first', 'last', 'older')
    if not kept then
      return nil
    elseif kept[1] and (not kept[2] or covers(number, kept[2], kept[3])) then
      return stem .. claim
    end
    claim = kept[4]
  end
end
