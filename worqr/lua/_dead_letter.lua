-- The dead-letter queue: its records, how a task gets there, and the job of the failure handler. The wire calls it `aside`.

-- As check_types, for the other keys used when a task of `worker` goes to the dead-letter queue, and its failure handler's
-- queue.
local function check_dead_letter_types(base, worker)
  local failures = base .. '-fail'
  redis.call('HLEN', base .. ':policy:' .. worker)
  redis.call('LLEN', failures)
  redis.call('HLEN', failures .. ':counts')
  redis.call('SCARD', failures .. ':hungry')
end

-- Deletes the dead-letter record under `claim`. The records of one id are linked to their neighbours, and the index has the
-- newest of them, so that each can be deleted without a search.
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

-- Writes the dead-letter record under `claim` and lists it, if it is to be kept; the oldest records above the cap are deleted.
local function store_dead_letter(base, claim, record, facts, how)
  local aside, list, keep = base .. ':aside:' .. claim, base .. ':' .. how.kind, tonumber(how.keep)
  if how.kind == 'broken' or keep > 0 then
    if record.job then
      redis.call('RENAME', base .. ':active:' .. record.id, aside)
      redis.call('HDEL', aside, 'claim', 'state', 'queued', 'suspect', 'cancel_reason')
    end
    facts.task, facts.older = record.task, redis.call('HGET', base .. ':aside', record.id) or nil
    if facts.older then
      set_field(base .. ':aside:' .. facts.older, 'newer', claim)
    end
    write_hash(aside, facts)
    redis.call('HSET', base .. ':aside', record.id, claim)
    redis.call('ZADD', list, facts.at, claim)
  end
  if how.kind == 'failed' then
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

-- Ends `claim` by moving its task to the dead-letter queue, and enqueues the failure handler's job in the same step. `how`:
-- kind (failed, broken), reason, keep (cap of failed, as text; '0': none), on_failure, ttl, worker, now, error_type,
-- error_message, error_traceback, error_fields (nil: none). Returns how many blocked jobs became claimable.
local function move_to_dead_letters(base, claim, record, how)
  local facts = {id = record.id, reason = how.reason, error_type = how.error_type, error_message = how.error_message,
    error_traceback = how.error_traceback, error_fields = how.error_fields, failures = record.failures,
    stalls = record.stalls, timeouts = record.timeouts, worker = how.worker, at = string.format('%.0f', how.now),
    meta = record.fields.meta}
  if how.on_failure then
    enqueue_failure_job(base, claim, record.task, facts)
  end
  store_dead_letter(base, claim, record, facts, how)
  if record.fields.twin then
    remove_twin(base, record.fields.twin, record.id)
  end
  redis.call('DEL', base .. ':active:' .. record.id, base .. ':claim:' .. claim)
  count(base, how.kind, 1, {record.id})
  if not record.job then
    return 0
  end
  local error = {'error_type', how.error_type, 'error_message', how.error_message, 'error_traceback',
    how.error_traceback}
  if how.error_fields then
    error[7], error[8] = 'error_fields', how.error_fields
  end
  local fields = record.fields
  local result = store_result(base, record.id, fields.first, fields.last, fields.result_ttl, how.ttl, 'failed', error)
  if result then
    local tries = {record.failures, record.stalls, record.timeouts, fields.progress or '', fields.message or ''}
    store_attempts(result, tries, how.kind == 'broken' and 1 or 0)
  end
  return unblock(base, record.id, how.now)
end

-- Moves the claimed job `id`, which was to begin before now, to the dead-letter queue. Returns false if a key has a foreign
-- type: an error in the middle of the move would lose the task.
-- LATER: most calls of the scripts do not need it.
local function expire(base, item, id, claim, worker, fields, now)
  local can_set_aside = pcall(function()
    check_types(base)
    check_dead_letter_types(base, worker)
  end)
  if not can_set_aside then
    return false
  end
  local how = worker_policy(base, worker)
  how.kind, how.reason, how.now, how.error_traceback = 'failed', 'expired', now, ''
  how.error_type, how.error_message = 'Expired', 'it was not started before it expired'
  move_to_dead_letters(base, claim, claimed_task(base, item, id, claim, fields), how)
  return true
end

-- The key of the dead-letter record of the job `id`, dispatch `number` (0: the newest); nil if there is none. `stem` is the
-- prefix of such keys. Reads the newest 100 records of the id.
local function find_dead_letter(aside_index, stem, id, number)
  local claim = redis.call('HGET', aside_index, id)
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
