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
  for _, name in ipairs(own(redis.pcall('HKEYS', aside)) or {}) do
    if name == 'task' then
      local task = readable and redis.call('HGET', aside, name) or ''
      record[#record + 1], record[#record + 2] = name, is_whole and task or string.sub(task, 1, head)
    elseif not is_large_saved(name) then
      record[#record + 1], record[#record + 2] = name, redis.call('HGET', aside, name)
    end
  end
  return record, readable and size or 0
end

-- Deletes the dead-letter record under `claim`; `is_retried`: its task is put back. The records of one id are linked to their neighbours, and the index has the
-- newest of them. So each can be deleted without a search.
local function delete_dead_letter(base, claim, is_retried)
  local aside = base .. ':aside:'
  local kept = own(redis.pcall('HMGET', aside .. claim, 'id', 'older', 'newer', 'first', 'tags', 'done', 'follow')) or {}
  local id, older, newer = kept[1], kept[2], kept[3]
  if older then
    set_field(aside .. older, 'newer', newer)
  end
  if newer then
    set_field(aside .. newer, 'older', older)
  elseif id then
    set_field(base .. ':aside', id, older)
  end
  if kept[5] and not kept[6] then
    remove_tags(base, kept[5], kept[4] or '', id or '')
  end
  if kept[7] and not is_retried then
    keep_follow_ups_of(base, kept[7], FOLLOW_UP_EXPIRE)
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

-- Enqueues the job of the queue's failure handler: the unchanged payload, how the task failed, and its tags.
local function enqueue_failure_job(base, claim, task, facts, tags)
  local failures = base .. '-fail'
  local id, token = new_id(failures, 'f' .. claim), next_token(failures)
  store_token(failures, token)
  local dispatch = digits(token)
  write_hash(failures .. ':job:' .. id, {task = task, failed = cmsgpack.pack(facts), run_at = facts.at,
    queued = dispatch, first = dispatch, last = dispatch, tags = tags})
  add_tags(failures, tags, dispatch, id, nil, 0)
  enqueue_job(failures, id, 0, 0)
  count(failures, 'enqueued', 1, {id})
  wake(failures, 1)
end

-- Stores the result of a job that failed. `ttl`: ms for which it is kept if the job does not say. `ended`: its field `tries`, with
-- the last one. `is_firing`: it is the run of a schedule.
local function store_failure(base, task, failure, ttl, ended, is_firing)
  local error = {'error_type', failure.error_type, 'error_message', failure.error_message, 'error_traceback',
    failure.error_traceback}
  if failure.error_fields then
    error[7], error[8] = 'error_fields', failure.error_fields
  end
  local fields = task.fields
  ttl = whole_number(fields.result_ttl, ttl)
  local result = store_result(base, task.id, fields.first, fields.last, ttl, 'failed', error)
  if result then
    local tries = {task.failures, task.stalls, task.timeouts, fields.progress or '', fields.message or ''}
    store_attempts(result, tries, failure.kind == 'broken' and 1 or 0)
  end
  if result and fields.keep then
    fields.task, fields.tries = task.task, ended or fields.tries
    keep_record(result, fields)
  end
  if result and fields.tags then
    redis.call('HSET', result, 'tags', fields.tags)
  end
  local done = bounds_of_end(fields.done, is_firing)
  if done then
    fields.done = done
    fields.tries, fields.task = ended or fields.tries, task.task
    fields.failures, fields.stalls, fields.timeouts = digits(task.failures), digits(task.stalls), digits(task.timeouts)
    local values = {}
    for i, name in ipairs(KEPT_FIELDS) do
      values[i] = fields[name] or false
    end
    error = with_needed(error, fields)
    keep_job(base, task.id, values, fields, 'failed', error, failure.kind == 'broken' and 1 or 0)
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
    enqueue_failure_job(base, claim, task.task, facts, task.fields.tags)
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
  if task.fields.parent or task.fields.follow then
    local error = packed_failure(failure.error_type, failure.error_message, failure.error_traceback, failure.error_fields)
    local is_dropped = failure.kind == 'failed' and policy.keep_failed == 0
    tell_end(base, task.id, {parent = task.fields.parent, follow = task.fields.follow, number = claim, reason = failure.reason,
      final = is_dropped or nil}, 'failed', error)
  end
  local is_firing = task.job and string.sub(task.id, 1, 5) == FIRING
  if is_firing then
    is_firing = note_outcome(base, task.id, 'failed', claim, task.fields.scheduled_for, failure.error_type or '', failure.error_message or '')
  end
  redis.call('DEL', base .. ':active:' .. task.id, base .. ':claim:' .. claim)
  count(base, failure.kind, 1, {task.id}, nil, nil,
    {{policy.worker, task.job or false, task.task, false, failure.error_type, failure.error_message}})
  if not task.job then
    return 0
  end
  store_failure(base, task, failure, policy.result_ttl, facts.tries, is_firing)
  return unblock(base, task.id, now)
end

-- Moves the claimed job `id`, which was to begin before now, to the dead-letter queue. Returns false if a key has a foreign
-- type: an error in the middle of the move would lose the task.
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
-- Reads the newest 100 records of the id. `first`: only that of the job that this dispatch has created (nil: any). As of results, the
-- dispatch belongs to the latest job that covers it.
local function find_dead_letter(base, id, number, first)
  local stem, claim = base .. ':aside:', own(redis.pcall('HGET', base .. ':aside', id))
  local found, latest
  for _ = 1, 100 do
    local kept = claim and own(redis.pcall('HMGET', stem .. claim, 'task', 'first', 'last', 'older'))
    if not kept then
      break
    elseif kept[1] and (first and kept[2] == first or not first and (number == 0 or not kept[2])) then
      return stem .. claim
    elseif kept[1] and not first and covers(number, kept[2], kept[3]) and whole_number(kept[2], 0, NEVER) > (latest or -1) then
      found, latest = stem .. claim, whole_number(kept[2], 0, NEVER)
    end
    claim = kept[4]
  end
  return found
end

-- Makes the dead-letter record `fields` under `claim` a job at the back of the queue, as the dispatch `number`, with all counters at
-- zero. `batch`: its field, if it is a member again. `seen`: the result of find_job. Returns how many tasks became claimable.
local function back_in_line(base, claim, fields, batch, seen, number, now)
  local id = fields.id
  delete_dead_letter(base, claim, true)
  redis.call('ZREM', base .. ':failed', claim)
  redis.call('ZREM', base .. ':broken', claim)
  local kept = {first = fields.first, meta = fields.meta, failed = fields.failed,
    scheduled_for = fields.scheduled_for, keep = fields.keep, batch = batch, parent = fields.parent, above = fields.above, follow = fields.follow,
    again = fields.parent and '1', batch_ended = fields.batch_ended, job_ended = fields.job_ended}
  local o = {id = id, fields = kept, lane = is_lane(fields.lane) and fields.lane or nil, done = fields.done, tags = fields.tags}
  drop_kept_job(base, (fields.done or string.sub(id, 1, 5) == FIRING) and fields.first or '') -- it has not ended any more
  for _, name in ipairs(POLICY) do
    kept[name] = fields[name]
  end
  if fields.saved_size or fields.life then
    copy_saved(fields, kept)
    kept.started = fields.life and fields.reason ~= 'expired' and '1' or nil
  end
  if not fields.first then -- it was a raw task
    kept.twin = redis.sha1hex(fields.task)
  end
  kept.twin = kept.twin or fields.twin
  if kept.twin then
    add_twin(base, kept.twin, id)
  end
  if batch then
    note_member(batch, 'back', id)
  end
  local _, ready = create_job(base, id, o, fields.task, number, now, now, seen)
  return ready
end

-- Puts one dead-letter record back, as back_in_line does, under a number of its own.
local function put_back_alone(base, claim, fields, batch, seen, now)
  local token = next_token(base)
  local ready = back_in_line(base, claim, fields, batch, seen, digits(token), now)
  store_token(base, token)
  count(base, 'enqueued', 1, {fields.id})
  return ready
end

-- Stores a new job of a workflow, as create_job does. If the workflow was put back, and has dropped the failure of this job, its record
-- is put back instead, so it keeps what it has saved. Not if its lifetime is over, nor without the right to change dead letters.
local function create_child(base, id, o, task, number, asked, now, seen)
  local claim, fields = o.parent.after, {}
  if own(redis.pcall('HGET', base .. ':aside:' .. claim, 'parent')) == parent_field(o.parent) then
    fields = read_hash(base .. ':aside:' .. claim)
  end
  if fields.id ~= id or not fields.task or whole_number(fields.lives_until, NEVER, NEVER) <= now
    or not permitted(redis.pcall('ZREM', base .. ':failed', claim)) then
    return create_job(base, id, o, task, number, asked, now, seen)
  end
  if fields.saved_size or fields.life then
    drop_last_failures(fields)
  end
  return 'created', back_in_line(base, claim, fields, nil, seen, number, now)
end

-- list_aside: one page of the dead-letter queue, newest first, after the end of the last page.
-- ARGV[1] kind failed or broken: which of the two lists
-- ARGV[2] limit records; 0: only the number
-- ARGV[3] budget records to look at
-- ARGV[4] max_bytes bytes of payload after which no further record is listed
-- ARGV[5] after claim at which the last page ended, - for the first
-- ARGV[6] after_ms its time
-- ARGV[7] before ms, only older ones; +inf: all
-- ARGV[8] error_type name of the error, whole or its last part; empty: any
-- ARGV[9] bare 1: only the claims
-- ARGV[10] since ms, only newer ones; -inf: all
-- ARGV[11] head bytes of a payload that are listed; -1: all of it
-- ARGV[12] batch token of the batch whose members are listed; empty: all
-- RETURNS ok after after_ms number entry... | more after after_ms number entry...: number is how many records of these times are
--   on this page and behind it, of any error_type; an entry is the claim, or claim and the record's names and values in turn,
--   and the size of the payload
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_aside()
  local queue = KEYS[1]
  local kind = ARGV[1]
  local limit, budget, max_bytes = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
  local after, after_ms, before, error_type, bare = ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9] == '1'
  local since, head, batch = ARGV[10], tonumber(ARGV[11]), ARGV[12]
  local list = queue .. ':' .. kind

  local start = own(redis.pcall('ZCOUNT', list, before, '+inf')) or 0
  if before == '+inf' then
    start = 0
  end
  if after ~= '-' then
    local rank = own(redis.pcall('ZREVRANK', list, after))
    start = math.max(start, rank and rank + 1 or (own(redis.pcall('ZCOUNT', list, '(' .. after_ms, '+inf')) or 0))
  end
  local last = own(redis.pcall('ZCOUNT', list, since, '+inf')) or 0
  local reply, bytes, looked = {'ok', after, after_ms, math.max(last - start, 0)}, 0, 0
  local page = limit > 0 and own(redis.pcall('ZREVRANGE', list, start, start + budget - 1, 'WITHSCORES')) or {}
  for i = 1, #page, 2 do
    if #reply - 4 >= limit or bytes >= max_bytes or start + looked >= last then
      break
    end
    local claim, aside = page[i], queue .. ':aside:' .. page[i]
    local type_of_error = error_type ~= '' and own(redis.pcall('HGET', aside, 'error_type')) or ''
    if batch ~= '' and string.match(own(redis.pcall('HGET', aside, 'batch')) or '', '^[^\n]+') ~= batch then
      type_of_error = nil
    end
    if type_of_error and (type_of_error == error_type or string.sub(type_of_error, -#error_type - 1) == '.' .. error_type) then
      local size = not bare and own(redis.pcall('HSTRLEN', aside, 'task')) or 0
      local record, copied = nil, 0
      if not bare then
        record, copied = dead_letter_entry(aside, size, head, max_bytes - bytes)
      end
      reply[#reply + 1] = {claim, record, size}
      bytes = bytes + copied
    end
    reply[2], reply[3], looked = claim, page[i + 1], looked + 1
  end
  if start + looked < last then
    reply[1] = 'more'
  end
  return reply
end

-- find_aside: finds the claims under which jobs failed, the newest of each id first; an id that is given twice gets two.
-- ARGV[1] kind failed or broken: which of the two lists
-- ARGV[2..] named ids
-- RETURNS ok claim...: as many as were found
-- RESEND safe: it only reads
-- FLAGS no-writes
local function find_aside()
  local queue = KEYS[1]
  local kind = ARGV[1]
  local list, dead_letter_index = queue .. ':' .. kind, queue .. ':aside'

  local MOST_STEPS = 1000 -- from one claim of an id to the one before it; claims that another application has linked may go round

  local reply, next_claim, steps = {'ok'}, {}, 0
  for i = 2, #ARGV do
    local named = ARGV[i]
    local claim = next_claim[named]
    if claim == nil then
      claim = own(redis.pcall('HGET', dead_letter_index, named))
    end
    while claim and not own(redis.pcall('ZSCORE', list, claim)) do
      steps = steps + 1
      claim = steps < MOST_STEPS and own(redis.pcall('HGET', queue .. ':aside:' .. claim, 'older'))
    end
    if claim then
      reply[#reply + 1] = claim
      claim = own(redis.pcall('HGET', queue .. ':aside:' .. claim, 'older'))
    end
    next_claim[named] = claim
  end
  return reply
end

-- retry_aside: turns dead-letter records into jobs, at the back of the queue, with all counters at zero. A task that was a member of
-- a batch is one again. A record stays where it is while a job with its id waits or runs, which would take its arguments if that run
-- is retried, or while its batch is being cancelled.
-- ARGV[4] kind failed or broken: which of the two lists
-- ARGV[5..] retried claims under which they failed
-- RETURNS ok retried | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function retry_aside()
  local queue = KEYS[1]
  local kind = ARGV[4]
  local list = queue .. ':' .. kind

  -- False if a key of another type is where the job's record, its active record or its reserved id would be.
  local function is_free(id)
    return own(redis.pcall('HLEN', queue .. ':job:' .. id)) and own(redis.pcall('HLEN', queue .. ':active:' .. id))
      and own(redis.pcall('GET', queue .. ':taken:' .. id)) ~= nil
  end

  check_types(queue)
  local stored, ready, ids, taken_over = 0, 0, {}, nil
  local token, now = next_token(queue)
  for i = 5, #ARGV do
    local retried = ARGV[i]
    local fields = redis.call('ZSCORE', list, retried) and read_hash(queue .. ':aside:' .. retried)
    local id = fields and fields.task and fields.id
    local free = id and is_free(id)
    taken_over = taken_over or id and not free and id
    local seen = free and find_job(queue, id)
    local batch, stays = nil, seen and (seen.job or seen.active)
    if seen and not stays and fields.batch then
      batch, stays = batch_to_rejoin(queue, fields.batch)
    end
    if seen and not stays then
      if fields.saved_size or fields.life then
        drop_last_failures(fields)
      end
      local put = back_in_line(queue, retried, fields, batch, seen, digits(token + stored), now)
      stored, ready, ids[#ids + 1] = stored + 1, ready + put, id
    end
  end
  if stored == 0 and taken_over then
    find_job(queue, taken_over) -- an error, before anything is written
  elseif stored > 0 then
    store_token(queue, token + stored - 1)
  end
  count(queue, 'enqueued', stored, ids)
  wake(queue, ready + count_members(queue))
  return {'ok', stored}
end

-- drop_aside: deletes records of the dead-letter queue.
-- ARGV[4] kind failed or broken: which of the two lists
-- ARGV[5..] dropped claims under which they failed
-- RETURNS ok dropped | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function drop_aside()
  local queue = KEYS[1]
  local kind = ARGV[4]
  local list = queue .. ':' .. kind

  check_types(queue)
  local deleted = 0
  for i = 5, #ARGV do
    local dropped = ARGV[i]
    if redis.call('ZREM', list, dropped) == 1 then
      delete_dead_letter(queue, dropped)
      deleted = deleted + 1
    end
  end
  return {'ok', deleted}
end

-- count_errors: counts the records of the dead-letter queue by the type of their error, those from one rank to another, the
-- oldest first.
-- ARGV[1] kind failed or broken: which of the two lists
-- ARGV[2] rank of the first record that is counted
-- ARGV[3] limit records
-- RETURNS ok type number... | more type number... (there are records behind them)
-- RESEND safe: it only reads
-- FLAGS no-writes
local function count_errors()
  local queue = KEYS[1]
  local kind = ARGV[1]
  local rank, limit = tonumber(ARGV[2]), tonumber(ARGV[3])
  local list = queue .. ':' .. kind

  local numbers, page = {}, own(redis.pcall('ZRANGE', list, rank, rank + limit - 1)) or {}
  for _, claim in ipairs(page) do
    local error_type = own(redis.pcall('HGET', queue .. ':aside:' .. claim, 'error_type'))
    if error_type then
      numbers[error_type] = (numbers[error_type] or 0) + 1
    end
  end
  local reply = {rank + #page < (own(redis.pcall('ZCARD', list)) or 0) and 'more' or 'ok'}
  for error_type, number in pairs(numbers) do
    reply[#reply + 1], reply[#reply + 2] = error_type, number
  end
  return reply
end
