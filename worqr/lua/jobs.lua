-- A job: its id, its record, its state and place in the queue, its end, and its cancellation.
-- What a dispatch changes is further down, what a claim changes in claims.lua. The `state` of a record is waiting (a
-- reference is in a list), due (the id is in the set of due times), suspended (workflows.lua), blocked (a job with the same id
-- runs) or active. A
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
  local run = own(redis.pcall('HMGET', active, 'claim', 'first', 'last')) or {}
  if run[1] and covers(number, run[2], run[3]) then
    return active
  end
  local kept = own(redis.pcall('HMGET', job, 'queued', 'first', 'last')) or {}
  if kept[1] and covers(number, kept[2], kept[3])
    and whole_number(kept[1], NEVER, NEVER) > whole_number(own(redis.pcall('HGET', counts, 'cleared')), 0, NEVER) then
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

-- Puts up to `limit` due jobs into the queue, and as many suspended ones whose time has come. Returns how many of them can be
-- claimed now.
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
  return pushed + wake_overdue(base, limit, now)
end

-- Deletes the active job `id`, and puts a blocked job of this id into the queue. `outcome`: finished, cancelled, or gone
-- (no result is stored). `facts` of a finished job: names and values in turn. `ttl`: ms for which the result is kept if the
-- job does not say. `none_blocked`: true if no job of this queue is blocked. Returns how many tasks became claimable.
local function end_job(base, id, outcome, facts, ttl, now, none_blocked)
  local active = base .. ':active:' .. id
  local kept = own(redis.pcall('HMGET', active, 'twin', 'first', 'last', 'result_ttl', 'cancel_reason', 'batch', 'parent', 'claim',
    'life', 'keep', 'done', 'tags', 'follow', 'again')) or {}
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
  if kept[7] or kept[13] then
    local value = outcome == 'finished' and facts[2] .. ' ' .. facts[4] or outcome == 'cancelled' and facts[2] or ''
    tell_end(base, id, {parent = kept[7], follow = kept[13], number = kept[8], again = kept[14], final = true}, outcome, value)
  end
  if kept[9] and outcome == 'cancelled' then
    cancel_children(base, active, id, kept[9], facts[2])
  end
  local is_firing = string.sub(id, 1, 5) == FIRING and outcome ~= 'gone'
  if is_firing then
    is_firing = note_outcome(base, id, outcome, kept[8], redis.call('HGET', active, 'scheduled_for'), '', outcome == 'cancelled' and facts[2] or '')
  end
  copy_attempts(result, active, 1)
  if result and kept[10] then
    keep_record(result, record_to_keep(active))
  end
  if kept[11] or kept[12] or is_firing then
    local ended = {first = kept[2], last = kept[3], done = kept[11], tags = kept[12], is_firing = is_firing, uncounted = 1, result = result}
    note_end(base, id, active, ended, outcome, facts)
  end
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
  local kept = redis.call('HMGET', job, 'twin', 'first', 'last', 'result_ttl', 'batch', 'parent', 'queued', 'life', 'keep',
    'done', 'tags', 'follow', 'again')
  if kept[1] then
    remove_twin(base, kept[1], id)
  end
  if kept[5] then
    note_member(kept[5], 'cancelled', id)
  end
  if kept[6] or kept[12] then
    tell_end(base, id, {parent = kept[6], follow = kept[12], number = kept[7], again = kept[13], final = true}, 'cancelled', reason)
  end
  if kept[8] then
    cancel_children(base, job, id, kept[8], reason)
  end
  local is_firing = string.sub(id, 1, 5) == FIRING
  if is_firing then
    is_firing = note_outcome(base, id, 'cancelled', nil, redis.call('HGET', job, 'scheduled_for'), '', reason)
  end
  local result = store_result(base, id, kept[2], kept[3], whole_number(kept[4], ttl), 'cancelled', {'reason', reason})
  copy_attempts(result, job, 0)
  if result and kept[9] then
    keep_record(result, record_to_keep(job))
  end
  if kept[10] or kept[11] or is_firing then
    local ended = {first = kept[2], last = kept[3], done = kept[10], tags = kept[11], is_firing = is_firing, uncounted = 0, result = result}
    note_end(base, id, job, ended, 'cancelled', {'reason', reason})
  end
  redis.call('DEL', job, base .. ':taken:' .. id)
end

-- Cancels the job `id` if it is waiting, due, suspended or blocked, in O(log n). Returns 1, or 0 if it is in none of these states.
local function cancel_queued(base, id, ttl, reason)
  local kept = own(redis.pcall('HMGET', base .. ':job:' .. id, 'state', 'queued', 'lane')) or {}
  if not kept[1] or whole_number(kept[2], NEVER, NEVER) <= cleared_up_to(base) then -- gone, or in the trash
    return 0
  end
  if kept[1] == 'waiting' or kept[1] == 'suspended' and holds_lane(base, kept[3], id) then
    add_stale(base, 1)
    if kept[3] then
      note_gone(base, kept[3], id)
    end
  end
  redis.call('ZREM', base .. ':due', id)
  redis.call('ZREM', base .. ':suspended', id)
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
  local claim, worker = store_cancel_reason(base, id, reason, last)
  if claim then
    request_cancel(base, claim, worker)
  end
  return claim
end

-- Cancels the job `id` in any state and frees the id, even if the job has ended. Returns how many jobs did not run (0 or
-- 1), and the claim of the run, or nil.
local function cancel_by_id(base, id, reason)
  local blocked = redis.call('SISMEMBER', base .. ':blocked', id) == 1
  local last = blocked and redis.call('HGET', base .. ':job:' .. id, 'last')
  local waiting = cancel_queued(base, id, longest_result_ttl(base), reason)
  redis.call('DEL', base .. ':taken:' .. id)
  count(base, 'cancelled', waiting, {id})
  return waiting, cancel_running(base, id, reason, last)
end

-- A dispatch: its options, and how it stores a new job, changes the job that has its id, or is refused.

-- The record fields that a dispatch may set; the handler's options supply the others.
local POLICY = {'max_failures', 'max_stalls', 'max_timeouts', 'retry_for', 'min_backoff', 'max_backoff', 'jitter', 'retry_on',
  'fail_on', 'reset_on_progress', 'timeout', 'result_ttl'}

-- The options of a dispatch, each with what it may be. They may come from any client. They are validated before the first
-- write, so that no worker that claims the job and no caller that lists it fails on them.
local OPTION_KINDS = {id = 'id', random = 'random', delay = 'delay', run_at = 'time', unique_for = 'positive',
  max_length = 'whole', at_most = 'whole', lane = 'lane', max_lane_length = 'whole', waiter = 'waiter',
  data = 'boolean', counts = 'boolean', front = 'boolean', policy = 'string',
  workflow = 'boolean', lifetime = 'digits', parent = 'parent', follow = 'follow',
  when = ' set keep later earlier ', exists = ' update skip raise cancel ', expires = 'digits', expires_at = 'time_text',
  scheduled_for = 'time_text', meta = 'meta', fields = 'fields', batch = 'batch', row = 'random', keep = 'boolean', done = 'done', tags = 'tags',
  by_hand = 'boolean'}

-- True if the table has only fields of POLICY, each with a possible value.
local function valid_fields(fields)
  if type(fields) ~= 'table' then
    return false
  end
  local known = ' ' .. table.concat(POLICY, ' ') .. ' '
  for name, value in pairs(fields) do
    local is_list = name == 'retry_on' or name == 'fail_on'
    if type(name) ~= 'string' or not string.find(known, ' ' .. name .. ' ', 1, true)
      or not (is_list and type(value) == 'string' and is_utf8(value) or is_digits(value)) then
      return false
    end
  end
  return true
end

-- True for a text that a program has drawn at random.
local function is_random(value)
  return type(value) == 'string' and #value >= 16 and #value <= 64 and not string.find(value, '%W')
end

-- True if the value can be the option `batch`: what open_part has replied, and what names the batch.
local function is_batch(value)
  return type(value) == 'table' and is_random(value.token) and type(value.number) == 'number' and value.number >= 1
    and value.number < 1e15 and value.number == math.floor(value.number)
    and is_line(value.home) and string.find(value.home, '{', 1, true) and is_line(value.id) and is_digits(value.keep)
    and (value.sealed == nil or type(value.sealed) == 'boolean')
    and (value.on_failed == nil or value.on_failed == 'cancel')
end

local LONGEST_DELAY = 200000000000000 -- ms: until the year 8300 or so, and not beyond LATEST

-- True if an option of this kind may have this value.
local function valid_option(kind, value)
  if kind == 'random' then
    return is_random(value)
  elseif kind == 'whole' or kind == 'positive' then
    local least = kind == 'whole' and 0 or 1
    return type(value) == 'number' and value >= least and value < 1e15 and value == math.floor(value)
  elseif kind == 'digits' then
    return is_digits(value)
  elseif kind == 'id' then
    return type(value) == 'string' and #value <= 200 and string.find(value, '^[^@]') and not string.find(value, '%c')
      and is_utf8(value)
  elseif kind == 'lane' then
    return is_lane(value)
  elseif kind == 'waiter' then
    return type(value) == 'string' and parsed_waiter(value)
  elseif kind == 'meta' then
    return type(value) == 'string' and #value <= 4096 and is_utf8(value)
  elseif kind == 'fields' then
    return valid_fields(value)
  elseif kind == 'tags' then
    return are_tags(value)
  elseif kind == 'done' then
    return type(value) == 'string' and kept_bounds(value) ~= nil and value ~= OF_SCHEDULE
  elseif kind == 'batch' then
    return is_batch(value)
  elseif kind == 'parent' then
    return is_parent(value)
  elseif kind == 'follow' then
    return is_follow(value)
  elseif kind == 'time' or kind == 'delay' then
    return valid_option('whole', value) and value <= (kind == 'time' and LATEST or LONGEST_DELAY)
  elseif kind == 'time_text' then
    return is_digits(value) and tonumber(value) <= LATEST
  elseif string.find(kind, '^ ') then
    return type(value) == 'string' and not string.find(value, ' ') and string.find(kind, ' ' .. value .. ' ', 1, true)
  end
  return type(value) == kind
end

-- Returns what is wrong with the options `o` of a job with the payload `task`, as an error reply; nil if they are valid. `whole`:
-- the jobs of the call are stored all or none.
local function invalid_job(o, task, whole)
  if type(o) ~= 'table' or not task then
    return redis.error_reply('ERR a job is its options, a msgpack map, and its task')
  elseif whole and o.row then
    return redis.error_reply('ERR a row of an outbox is stored by itself, not all or none')
  end
  for name, value in pairs(o) do
    if not OPTION_KINDS[name] then
      return redis.error_reply('ERR a dispatch has no such option: ' .. name)
    elseif not valid_option(OPTION_KINDS[name], value) then
      local is_time = OPTION_KINDS[name] == 'time' or OPTION_KINDS[name] == 'time_text'
      return redis.error_reply('ERR the option ' .. name .. ' of a dispatch cannot be that'
        .. (is_time and ': it must be whole milliseconds since 1970, and not after the year 9999' or ''))
    end
  end
  return nil
end

-- Reads the state of the id `id`. Returns: `job`, if it is waiting, due, suspended or blocked; `active`, true while it runs; `begun`,
-- true if it is a workflow that has begun, and whose run is not to be cancelled: no dispatch changes it; `taken`,
-- true while the id is reserved; `last`, the newest of its dispatches. A record in the trash does not count; then `trashed`
-- has the reason for the deletion, which holds for the whole id.
local function find_job(base, id, cleared)
  if redis.call('EXISTS', base .. ':job:' .. id, base .. ':active:' .. id, base .. ':taken:' .. id) == 0 then
    return {last = '0'} -- most ids are new: one command instead of three
  end
  local kept = redis.call('HMGET', base .. ':job:' .. id, 'state', 'queued', 'run_at', 'last', 'update_low',
    'update_high', 'update_policy', 'saved_size', 'life', 'started', 'parent', 'first', 'done', 'tags', 'follow')
  local active = redis.call('HMGET', base .. ':active:' .. id, 'claim', 'last', 'life', 'parent')
  cleared = cleared or redis.call('HMGET', base .. ':counts', 'cleared', 'cleared_why')
  local trashed = kept[1] and whole_number(kept[2], NEVER, NEVER) <= whole_number(cleared[1], 0, NEVER) and (cleared[2] or '') or nil
  local taken = redis.call('GET', base .. ':taken:' .. id)
  if trashed then
    taken = false
  end
  local seen = {active = active[1] and true, taken = taken and true, trashed = trashed, parent = active[4] or kept[11]}
  seen.last = active[2] or taken or '0'
  if kept[1] and not trashed then
    seen.job = {state = kept[1], run_at = whole_number(kept[3], 0, LATEST), low = whole_number(kept[5], 0, NEVER), high = whole_number(kept[6], NEVER, NEVER),
      policy = kept[7] or '', has_saved = (kept[8] or kept[9]) and true, first = kept[12], done = kept[13], tags = kept[14],
      follow = kept[15]}
    seen.last = kept[4]
  end
  if active[1] and active[3] then
    seen.begun = redis.call('SISMEMBER', base .. ':cancelling', active[1]) == 0
  else
    seen.begun = seen.job and kept[9] and kept[10] and kept[1] ~= 'blocked'
  end
  return seen
end

-- Returns why the dispatch `o` stores nothing: duplicate (a member of a batch is always a new job), unchanged, full, closed (its
-- part of the batch takes no members of this version any more); or nil. A child that is there already is unchanged. `more`: jobs
-- that are stored before it; `more_in_lane`: those of them that will wait in its lane. If the queue is full, and the producer waits
-- for room, this is noted.
local function refusal(base, o, seen, more, more_in_lane)
  if o.parent and (seen.job or seen.active or seen.taken or seen.trashed) then
    return seen.parent == parent_field(o.parent) and 'unchanged' or 'duplicate'
  elseif seen.job or seen.active or seen.taken then
    if o.exists == 'raise' or o.batch then
      return 'duplicate'
    elseif o.exists == 'skip' or not seen.job and not seen.active or seen.begun and o.exists ~= 'cancel' then
      return 'unchanged'
    end
  end
  local full = o.max_length and queued_length(base) + more >= o.max_length or o.max_lane_length and o.lane
    and lane_waiting(base, o.lane) + more_in_lane >= o.max_lane_length
  if seen.job then
    return nil
  elseif not full then
    return o.batch and is_closed(base, o.batch) and 'closed' or nil
  end
  if o.waiter then
    note_waiter(base, o.waiter, o.max_length, o.max_lane_length, o.lane)
  end
  return 'full'
end

-- True if the dispatch `o` of a new job puts it into its lane at once: it is not due later, and no run of its id blocks it.
local function enters_lane(o, seen)
  local now = now_ms()
  return o.lane and not (seen and seen.active) and (o.run_at or now + (o.delay or 0)) <= now
end

-- True if `name` is among the `names`, which are one text.
local function has_name(names, name)
  return string.find(' ' .. names .. ' ', ' ' .. name .. ' ', 1, true) ~= nil
end

-- True if the dispatch sets the counters of the job to zero.
local function resets_counters(o)
  if o.counts == nil then
    return o.data ~= false
  end
  return o.counts
end

-- Returns the names of the fields that the dispatch sets and that replace stored values, with those in `others`; nil if
-- there are none.
local function replaced_names(o, others)
  local forced = {}
  for _, name in ipairs(POLICY) do
    if has_name(others, name) or o.fields and o.fields[name] and has_name(o.policy or '', name) then
      forced[#forced + 1] = name
    end
  end
  return forced[1] and table.concat(forced, ' ') or nil
end

-- Replaces a field of the policy if the dispatch says so, else only sets a missing one. Returns true if it changed
-- anything.
local function change_policy(job, o)
  local changed = false
  for name, value in pairs(o.fields or {}) do
    if has_name(o.policy or '', name) then
      changed = redis.call('HGET', job, name) ~= value or changed
      redis.call('HSET', job, name, value)
    else
      changed = redis.call('HSETNX', job, name, value) == 1 or changed
    end
  end
  return changed
end

-- Files the lane of a waiting job that was to be retried later, and is due now. Returns 1 if it may start, else 0.
local function retry_now(base, id, now)
  local lane = redis.call('HGET', base .. ':job:' .. id, 'lane')
  if not lane then
    return 0
  end
  local _, is_new = file_lane(base, lane, now)
  return is_new and 1 or 0
end

-- Moves a waiting or due job to its new due time. Returns 1 if it became claimable, else 0.
local function move_to_due_time(base, id, kept, run_at, now, front)
  if kept.state == 'waiting' then
    if run_at <= now then
      notify(base, id, 'waiting')
      return kept.run_at > now and retry_now(base, id, now) or 0 -- the position stays
    end
    add_stale(base, 1)
  else
    redis.call('ZREM', base .. ':due', id)
  end
  local fields = redis.call('HMGET', base .. ':job:' .. id, 'suspect', 'lane')
  if fields[2] and kept.state == 'waiting' then
    note_gone(base, fields[2], id)
  end
  local ready = enqueue_job(base, id, run_at, now, front, fields[1], fields[2])
  if fields[2] and kept.state == 'waiting' then
    job_left_lane(base, fields[2], id, now)
  end
  return ready
end

-- Returns the due time `asked`, but no later than the time `latest` of the job, which the first dispatch with `at_most`
-- sets. A job that is due after that keeps its time.
local function no_later(job, at_most, kept, asked, now)
  redis.call('HSETNX', job, 'latest', digits(now + at_most))
  local latest = whole_number(redis.call('HGET', job, 'latest'), 0)
  return math.min(asked, math.max(kept.run_at, latest))
end

-- Returns the fields that a dispatch with another payload sets in the job `kept`, whose tags it replaces. `delay`: ms until it is due.
local function new_data(base, id, o, task, kept, delay)
  if kept.tags or o.tags then
    change_tags(base, id, kept, o, delay)
  end
  return {task = task, meta = o.meta, scheduled_for = o.scheduled_for, keep = o.keep and '1' or nil, done = o.done, tags = o.tags,
    update_data = kept.state == 'blocked' and '1' or nil}
end

-- Changes the waiting, due or blocked job, field by field as the dispatch says. `kept`: the `job` of find_job. Returns the
-- outcome, and how many tasks became claimable.
local function update_job(base, id, o, task, number, asked, now, kept)
  local job, blocked, fields, gone = base .. ':job:' .. id, kept.state == 'blocked', {last = number}, {}
  asked = o.at_most and no_later(job, o.at_most, kept, asked, now) or asked
  local lower, upper = due_bounds(o.when, asked)
  local run_at = clamp(kept.run_at, lower, upper)
  local changed = o.data ~= false or resets_counters(o) or changes_due_time(o, kept, run_at, asked, now)
  if o.data ~= false then
    fields, gone = new_data(base, id, o, task, kept, run_at - now), {'meta', 'scheduled_for', 'done', 'tags', 'follow'}
    fields.last = number
    fields.follow = (kept.follow or o.follow) and replace_follow(base, kept.follow, o.follow) or nil
  end
  if run_at ~= kept.run_at or (o.when or 'set') == 'set' then
    changed = changed or changes_expiry(job, o)
    fields.run_at, fields.expires, fields.expires_at = digits(run_at), o.expires, o.expires_at
    gone[#gone + 1], gone[#gone + 2] = 'expires', 'expires_at'
  end
  if resets_counters(o) then
    fields.update_counts = blocked and '1' or nil
    for _, counter in ipairs({'failures', 'stalls', 'timeouts', 'suspect', 'error_type', 'error_message', 'tries', 'failing_since'}) do
      gone[#gone + 1] = counter
    end
  end
  if blocked then
    fields.update_low = digits(clamp(kept.low, lower, upper))
    fields.update_high = digits(clamp(kept.high, lower, upper))
    fields.update_policy = replaced_names(o, kept.policy)
  end
  if #gone > 0 then
    redis.call('HDEL', job, unpack(gone))
  end
  write_hash(job, fields)
  changed = change_policy(job, o) or changed
  if blocked then
    notify(base, id, 'blocked')
    return 'blocked', 0
  end
  local ready = run_at ~= kept.run_at and move_to_due_time(base, id, kept, run_at, now, o.front) or 0
  return changed and 'updated' or 'unchanged', ready
end

-- Stores a job whose id runs. Stores also what its dispatch would have changed, in case that run is retried instead of
-- ending.
local function store_blocked_job(base, id, o, fields, asked)
  local lower, upper = due_bounds(o.when, asked)
  fields.state, fields.update_low, fields.update_high = 'blocked', digits(lower), digits(upper)
  fields.update_data, fields.update_policy = o.data ~= false and '1' or nil, replaced_names(o, '')
  fields.update_counts = resets_counters(o) and '1' or nil
  write_hash(base .. ':job:' .. id, fields)
  redis.call('SADD', base .. ':blocked', id)
  notify(base, id, 'blocked')
  return 'blocked', 0
end

-- Deletes the job `id` of a deleted queue, for the `reason` stored with the deletion, and frees the place that a suspect has in its
-- lane. Its item in the trash is skipped then. `ttl`: as for delete_cancelled_job.
local function delete_trashed_job(base, id, ttl, reason)
  local lane = redis.call('HGET', base .. ':job:' .. id, 'lane')
  delete_cancelled_job(base, id, ttl, reason)
  if lane then
    wake(base, free_places(base, {':' .. id}, now_ms()))
  end
end

-- Returns the time (ms as text) at which the life of a workflow ends that has a lifetime, is dispatched now and due at `asked`.
local function life_end(o, asked, now)
  return digits(math.min(LATEST, math.max(asked, now) + tonumber(o.lifetime)))
end

-- Stores a new job; blocked, if the same id runs (`seen.active`). Returns the outcome, and how many tasks became claimable.
local function create_job(base, id, o, task, number, asked, now, seen)
  local job = base .. ':job:' .. id
  local fields = {task = task, run_at = digits(asked), queued = number, first = number, last = number, meta = o.meta,
    scheduled_for = o.scheduled_for, expires = o.expires, expires_at = o.expires_at, lane = o.lane,
    parent = o.parent and parent_field(o.parent) or nil, above = o.parent and o.parent.above or nil, life = o.workflow and number or nil,
    lives_until = o.lifetime and life_end(o, asked, now) or nil, lifetime = o.lifetime,
    latest = o.at_most and digits(now + o.at_most), keep = o.keep and '1' or nil,
    batch = o.batch and enter_batch(o.batch, id) or nil, done = o.done, tags = o.tags}
  if o.fields then
    for name, value in pairs(o.fields) do
      fields[name] = value
    end
  end
  if o.follow then
    fields.follow = replace_follow(base, nil, o.follow)
  end
  if seen.trashed then
    delete_trashed_job(base, id, longest_result_ttl(base), seen.trashed)
  end
  if o.id then
    replace_ended(base, id, o.done)
  end
  if o.tags then
    add_tags(base, o.tags, fields.first, id, o.done, asked - now)
  end
  if o.by_hand then
    expect_outcome(base, id)
  end
  if seen.active then
    return store_blocked_job(base, id, o, fields, asked)
  end
  fields.state = state_at(asked, now)
  write_hash(job, fields)
  return 'created', place(base, id, asked, now, o.front, false, o.lane)
end

-- Runs one dispatch: stores a new job, or changes the job that has its id. Returns the outcome, the id, the dispatch that its
-- handle waits for, how many tasks became claimable, and how many jobs were added.
-- A refusal for lack of room is counted, unless the producer waits.
-- `number`: the dispatch's fencing token, as text. `seen`: the result of find_job, if the script has it.
-- `o`, the options: id (nil: a new one, made with `random`), delay or run_at (ms), when (set, keep, later, earlier),
--   exists (update, skip, raise, cancel), at_most (ms), data, counts, policy (names of fields to replace), fields, meta, front,
--   expires, expires_at, scheduled_for, unique_for, max_length, lane, max_lane_length, waiter (of queue.lua), batch (token, home,
--   id, number, sealed, keep, on_failed), workflow (its runs may be suspended), lifetime (ms as text, of a workflow),
--   parent (base, id, life, key, after, above; of a child), follow (token, and the bases of the queues that hold `then` and `otherwise`), row
--   (of an outbox, see upsert_row), keep (the record stays with the result), done and tags (of finished.lua),
--   by_hand (a schedule is run by hand: its end is noted as that of a firing)
local function upsert(base, o, task, number, now, seen)
  local id = o.id or new_id(base, number, o.random)
  if o.done and string.sub(id, 1, 5) ~= FIRING then
    o.done = bounds_of_end(o.done)
  end
  seen = seen or o.id and find_job(base, id) or {last = number}
  local outcome = refusal(base, o, seen, 0, 0)
  if outcome == 'full' and not o.waiter then
    tally(base, 'refused', 1)
  end
  if not outcome and o.parent and repeats_end(base, id, o.parent, tonumber(o.parent.after)) then
    outcome = 'unchanged'
  end
  if outcome then
    return outcome, id, seen.last, 0, 0
  end
  if o.exists == 'cancel' and seen.active then
    cancel_running(base, id, 'a later job with its id was dispatched')
  elseif o.exists == 'cancel' and seen.begun then
    count(base, 'cancelled', cancel_queued(base, id, longest_result_ttl(base), 'a later job with its id was dispatched'), {id})
    seen = {last = number}
  end
  local ready
  local asked = o.run_at or now + (o.delay or 0)
  if seen.job then
    if seen.job.has_saved and o.data ~= false then
      local lives_until = o.lifetime and life_end(o, asked, now) or nil
      forget_saved_of_other(base .. ':job:' .. id, task, number, lives_until, o.lifetime)
    end
    outcome, ready = update_job(base, id, o, task, number, asked, now, seen.job)
  elseif o.parent then
    outcome, ready = create_child(base, id, o, task, number, asked, now, seen)
  else
    outcome, ready = create_job(base, id, o, task, number, asked, now, seen)
  end
  if o.unique_for then
    redis.call('SET', base .. ':taken:' .. id, number, 'PX', digits(o.unique_for))
  end
  return outcome, id, number, ready, seen.job and 0 or 1
end

-- A row of an outbox in a database becomes at most one job: the row's name is remembered in a key of its own. Whatever ends,
-- cancels or deletes the job leaves that key, so that a row that is sent again is never a new job.

local SENT_FOR = 604800000 -- ms, a week, for which a row may be sent again while its database is away
local SENT_AFTER_DELETE = 600000 -- ms: no sender holds a row for that long after it has been deleted

-- Runs one dispatch of a `row`, as `upsert` does. If an earlier one stored it, nothing is stored, and the outcome is sent, with
-- the id and the number that the earlier one returned. A row that was refused for lack of room may be sent again.
local function upsert_row(base, o, task, number, now, seen)
  local sent = base .. ':sent:' .. o.row
  local earlier, of = string.match(own(redis.pcall('GET', sent)) or '', '^(%d+) (.+)$')
  if earlier then
    return 'sent', of, earlier, 0, 0
  end
  local outcome, id, last, ready, made = upsert(base, o, task, number, now, seen)
  if outcome ~= 'full' and outcome ~= 'closed' then
    redis.call('SET', sent, last .. ' ' .. id, 'PX', SENT_FOR)
  end
  return outcome, id, last, ready, made
end

-- Runs one dispatch, as `upsert` does, of a row or of none.
local function dispatch_one(base, o, task, number, now, seen)
  if o.row then
    return upsert_row(base, o, task, number, now, seen)
  end
  return upsert(base, o, task, number, now, seen)
end

-- The result of a job: how long it is kept, how it is found, and how it is stored.

-- Returns for how many milliseconds this queue keeps results if the job does not say: the longest time that its workers
-- set. That is one read, however many workers there are.
local function longest_result_ttl(base)
  return whole_number(redis.call('ZRANGE', base .. ':result_ttls', -1, -1, 'WITHSCORES')[2], 0)
end

-- Returns the first dispatch of the job whose record or result is at `key`.
local function first_of(key)
  return whole_number(own(redis.pcall('HGET', key, 'first')), 0, NEVER)
end

-- Returns the key and the outcome of the result of the dispatch `number`, or nil. The newest dispatch is 0. The older
-- result never belongs to it, even if the newest kept none. An outcome that no script writes is no result. A job that was put back
-- covers later jobs of its id too: of two results, the dispatch belongs to that of the later job.
local function find_result(result, older_result, number)
  local found, outcome, latest
  for _, key in ipairs({result, number ~= 0 and older_result or nil}) do
    local kept = own(redis.pcall('HMGET', key, 'outcome', 'first', 'last')) or {}
    local known, first = kept[1] == 'finished' or kept[1] == 'failed' or kept[1] == 'cancelled', whole_number(kept[2], 0, NEVER)
    if known and covers(number, kept[2], kept[3]) and first > (latest or -1) then
      found, outcome, latest = key, kept[1], first
    end
  end
  return found, outcome
end

-- Stores how the job `id` ended for `ttl` ms and notifies the callers that wait for it. `first` and `last` are the dispatches
-- to which the result belongs; `facts` names and values in turn. Returns the key of the result, or false if `ttl` is 0.
local function store_result(base, id, first, last, ttl, outcome, facts)
  local result = ttl > 0 and base .. ':result:' .. id
  if result then
    retire_result(base, id)
    redis.call('HSET', result, 'outcome', outcome, 'first', first or '0', 'last', last or '0', unpack(facts))
    redis.call('PEXPIRE', result, string.format('%.0f', ttl))
  end
  notify(base, id, outcome)
  return result
end

-- Makes room for the result of a newer dispatch. The result of the one before it stays for callers that are about to read
-- it.
local function retire_result(base, id)
  local result = base .. ':result:' .. id
  if redis.call('EXISTS', result) == 1 then
    redis.call('RENAME', result, base .. ':older_result:' .. id)
  end
end

-- Does the same, and if the newer dispatch is not to be kept (`done`), makes the id name no kept job, which it would replace.
local function replace_ended(base, id, done)
  local newest = base .. ':done_id:' .. id
  if redis.call('EXISTS', base .. ':result:' .. id, newest) > 0 then
    retire_result(base, id)
    if not done then
      redis.call('DEL', newest)
    end
  end
end

-- Stores the attempt counters in a result: failures if there were any, attempts if it is not 1, and the last progress.
-- `kept`: failures, stalls, timeouts, progress, message. `uncounted`: the attempts that the three counters do not count.
local function store_attempts(result, kept, uncounted)
  local failures = whole_number(kept[1], 0)
  local attempts = failures + whole_number(kept[2], 0) + whole_number(kept[3], 0) + uncounted
  if attempts ~= 1 then
    redis.call('HSET', result, 'attempts', digits(attempts))
  end
  if failures > 0 then
    redis.call('HSET', result, 'failures', digits(failures))
  end
  if kept[4] and kept[4] ~= '' then
    redis.call('HSET', result, 'progress', kept[4])
  end
  if kept[5] and kept[5] ~= '' then
    redis.call('HSET', result, 'message', kept[5])
  end
end

-- Like `store_attempts`, from the record `key`. Does nothing if `result` is false.
local function copy_attempts(result, key, uncounted)
  if result then
    local kept = own(redis.pcall('HMGET', key, 'failures', 'stalls', 'timeouts', 'progress', 'message')) or {}
    store_attempts(result, kept, uncounted)
  end
end

-- The fields of a record that stay with the result of a job whose dispatch had the option `keep`.
local KEPT = {'task', 'meta', 'tries', 'worker', 'claim', 'run_at', 'step:@errors'}

-- Returns those fields of the record `key`.
local function record_to_keep(key)
  local values, fields = own(redis.pcall('HMGET', key, unpack(KEPT))) or {}, {}
  for i, name in ipairs(KEPT) do
    fields[name] = values[i] or nil
  end
  return fields
end

-- Adds the `fields` of a record to its result, and when it ended.
local function keep_record(result, fields)
  local kept = {ended = digits(now_ms())}
  for _, name in ipairs(KEPT) do
    kept[name] = fields[name]
  end
  write_hash(result, kept)
end

-- Returns the names under which `jobs` waited for room, but those under which one was refused now.
local function served_waiters(jobs, reply)
  local refused, served = {}, {}
  for i, job in ipairs(jobs) do
    local waiter = job[1].waiter
    if waiter then
      refused[waiter] = refused[waiter] or reply[i + 1][1] == 'full'
    end
  end
  for waiter, is_refused in pairs(refused) do
    served[#served + 1] = not is_refused and waiter or nil
  end
  return served
end

-- dispatch_jobs: stores jobs, or changes those that have the same id, each by its options. A job whose id runs is blocked until
-- that run ends. Wakes as many waiting workers as there are new tasks.
-- ARGV[4] whole 1: if one is a duplicate or the queue is full, none is stored
-- ARGV[5..] jobs options (a msgpack map, see `dispatch` above) and task bytes, in turn
-- RETURNS ok entry... | refused entry... (whole: up to the one that was refused) | late; an entry is outcome (created, updated,
--   blocked, unchanged, duplicate, full, closed, sent), id, number of the dispatch that its handle waits for; sent: an earlier
--   dispatch had the same row, and this one stores nothing
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- ALWAYS whole_number own producer_state is_plain forget_replies numbered digits is_utf8 write_hash check_types next_token
-- ALWAYS store_token renew_hourly count member_changes kept_changes count_members wake new_id place notify state_at OPTION_KINDS POLICY
-- ALWAYS announce_moment valid_option is_random is_digits valid_fields invalid_job refusal find_job retire_result replace_ended
-- ALWAYS create_job upsert dispatch_one
-- OFTEN add_to check_lane_types check_rare_types clamp file_lane filed_in is_lane lane_length lane_list lane_room lane_rules
-- OFTEN limits_of now_ms parsed_limits push_to_lane queued_length renew_counts room_of rule_names rules_of start_entry
-- OFTEN startable starts_within turn_number turn_text waiting_length
local function dispatch_jobs()
  local queue = KEYS[1]
  local whole = ARGV[4] == '1'

  -- Everything that can be wrong is checked before the first write: types, options, and, of a whole, what is refused.
  check_types(queue)
  local jobs, looked, more, in_lane, reply = {}, {}, 0, {}, {'ok'}
  for i = 5, #ARGV, 2 do
    local job, task = ARGV[i], ARGV[i + 1]
    local o = cmsgpack.unpack(job)
    local wrong = invalid_job(o, task, whole)
    if wrong then
      return wrong
    end
    local seen = o.id and find_job(queue, o.id)
    if whole then
      local lane = o.lane or ''
      local status = refusal(queue, o, seen or {}, more, in_lane[lane] or 0)
      if o.id and looked[o.id] then
        status = (o.exists == 'raise' or o.batch) and 'duplicate' or nil
      elseif not status and not (seen and seen.job) then
        more, in_lane[lane] = more + 1, (in_lane[lane] or 0) + (enters_lane(o, seen) and 1 or 0)
      end
      reply[#reply + 1] = {status or 'created', o.id or '', seen and seen.last or '0'}
      if status and status ~= 'unchanged' then
        reply[1] = 'refused'
        return reply
      end
    end
    if o.id then
      looked[o.id] = true
    end
    jobs[#jobs + 1] = {o, task, seen}
  end

  local created, ready, subscribers, ids, waits = 0, 0, nil, nil, false
  local token, now, assigned = next_token(queue)
  store_token(queue, token + #jobs - 1)
  reply = {'ok'}
  local done = {}
  for i, job in ipairs(jobs) do
    local o, task, seen = job[1], job[2], job[3]
    if o.id and done[o.id] then
      seen = find_job(queue, o.id)
    end
    local outcome, id, last, put, made = dispatch_one(queue, o, task, digits(token + i - 1), now, seen)
    done[id], created, ready = true, created + made, ready + put
    waits = waits or o.waiter
    if made == 1 then
      subscribers = subscribers or redis.pcall('PUBSUB', 'NUMSUB', queue .. ':events')
      ids = ids or subscribers[2] and subscribers[2] > 0 and {}
      if ids then
        ids[#ids + 1] = id
      end
    end
    reply[#reply + 1] = {outcome, id, last}
  end
  renew_hourly(queue, assigned, now)
  count(queue, 'enqueued', created, ids, subscribers)
  wake(queue, ready + count_members(queue))
  if waits then
    leave_waiters(queue, served_waiters(jobs, reply))
  end
  return reply
end

-- shorten_sent: rows of an outbox that were sent to this queue have been deleted from their database. Remembers them ten minutes
-- longer, in place of a week.
-- ARGV[1..] rows their names
-- RETURNS ok
-- RESEND safe: a copy shortens nothing twice
-- FLAGS allow-oom
local function shorten_sent()
  local queue = KEYS[1]

  for i = 1, #ARGV do
    local row = ARGV[i]
    local sent = queue .. ':sent:' .. row
    if redis.call('PTTL', sent) > SENT_AFTER_DELETE then
      redis.call('PEXPIRE', sent, SENT_AFTER_DELETE)
    end
  end
  return {'ok'}
end

-- promote_due: puts due jobs into the queue, files the lanes whose moment has come, and wakes workers for what may start now; returns when more may, because a job is
-- due, a rate allows it, or a pause ends.
-- ARGV[1] limit jobs in one call
-- RETURNS ok promoted next_in relay: next_in ms until then, 0 if more are due now, -1 if nothing is known; relay 1 if there are
--   messages for other queues, or batches to look at
-- RESEND safe: a copy promotes the jobs that are due then
-- FLAGS allow-oom
local function promote_due()
  local queue = KEYS[1]
  local limit = tonumber(ARGV[1])
  local due = queue .. ':due'

  check_types(queue)
  redis.call('ZCARD', queue .. ':batches')
  local now = now_ms()
  local pushed = promote(queue, limit, now)
  open_lanes(queue, limit, now)
  local waiting = startable_items(queue)
  wake(queue, waiting)
  local start_in, check_in = next_start_in(queue, due, waiting, now), next_check_in(queue, now)
  local next_in = (start_in < 0 or check_in >= 0 and check_in < start_in) and check_in or start_in
  return {'ok', pushed, next_in, needs_relay(queue, now)}
end

-- True if the waiting job `id` holds its strict lane until it is retried at `run_at`, which is later.
local function holds_lane_until(base, id, lane, run_at, now)
  return whole_number(run_at, 0, LATEST) > now and holds_lane(base, lane, id)
end

-- Puts the job `id`, which is due, suspended or in line, into the queue now. Returns how many tasks became claimable.
local function stand_in_line(base, id, state, now)
  local kept = redis.call('HMGET', base .. ':job:' .. id, 'suspect', 'lane', 'run_at')
  if state == 'suspended' then
    return wake_suspended(base, id, now)
  elseif state == 'waiting' and holds_lane_until(base, id, kept[2], kept[3], now) then
    redis.call('HSET', base .. ':job:' .. id, 'run_at', digits(now))
    notify(base, id, 'waiting')
    return retry_now(base, id, now)
  elseif state ~= 'due' or redis.call('ZREM', base .. ':due', id) == 0 then
    notify(base, id, 'event')
    return 0
  end
  redis.call('HSET', base .. ':job:' .. id, 'run_at', digits(now))
  return enqueue_job(base, id, 0, now, false, kept[1], kept[2])
end

-- promote_jobs: makes scheduled jobs due now and puts them at the back of the queue, in the order of their names. A job that waits
-- in front of a strict lane for its next try stays there, and is due now, too. Any other job stays as it is.
-- ARGV[4..] ids of the jobs, 1000 at most
-- RETURNS ok promoted | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function promote_jobs()
  local queue = KEYS[1]
  local due = queue .. ':due'

  check_types(queue)
  local promoted, ready, now = 0, 0, now_ms()
  for i = 4, #ARGV do
    local id = ARGV[i]
    local kept = own(redis.pcall('HMGET', queue .. ':job:' .. id, 'state', 'lane', 'run_at')) or {}
    if kept[1] == 'due' and redis.call('ZSCORE', due, id)
      or kept[1] == 'waiting' and holds_lane_until(queue, id, kept[2], kept[3], now) then
      ready = ready + stand_in_line(queue, id, kept[1], now)
      promoted = promoted + 1
    end
  end
  wake(queue, ready)
  return {'ok', promoted}
end

-- cancel_job: cancels a job by its id: a waiting, due or blocked job is deleted, a running one is marked and its worker
-- notified.
-- ARGV[4] id of the job
-- ARGV[5] reason text for callers that wait for its result
-- RETURNS ok waiting claim...: how many did not run, and the claim that is marked | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- ALWAYS whole_number own digits producer_state is_plain forget_replies numbered check_types job_id longest_result_ttl count
-- ALWAYS permitted cancel_queued store_cancel_reason request_cancel cancel_running cancel_by_id count_members wake give_room member_changes
-- ALWAYS kept_changes
-- FLAGS allow-oom
local function cancel_job()
  local queue = KEYS[1]
  local id, reason = ARGV[4], ARGV[5]

  check_types(queue)
  redis.call('HLEN', queue .. ':job:' .. id)
  redis.call('HLEN', queue .. ':active:' .. id)
  local waiting, claim = cancel_by_id(queue, id, reason)
  wake(queue, count_members(queue))
  give_room(queue)
  return {'ok', waiting, claim}
end

-- cancel_task: cancels every task of a queue with this payload: waiting ones are removed, running ones are marked and their
-- workers notified. One call inspects the whole queue if no more than budget claims are held on it.
-- ARGV[4] task bytes
-- ARGV[5] cursor among the twins, 0 at first, - when they are done
-- ARGV[6] after place among the claims up to which they were looked at, - at first
-- ARGV[7] page twins to look at in one call
-- ARGV[8] budget claims to look at in one call
-- ARGV[9] reason text for callers that wait for a result
-- RETURNS ok waiting running cursor after claim... | more (the same; call again with cursor and after) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function cancel_task()
  local queue = KEYS[1]
  local task = ARGV[4]
  local cursor, after, page, budget, reason = ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[8]), ARGV[9]
  local counts = queue .. ':counts'

  check_types(queue)
  redis.call('HLEN', counts)
  local holders, ttl = claim_holders(queue), longest_result_ttl(queue)

  local reply, marked = {'ok', 0, 0, cursor, after}, {}
  local function note(claim, worker)
    marked[#marked + 1], marked[#marked + 2], reply[#reply + 1] = claim, worker, claim
  end

  local first, raw, jobs, ids = cursor == '0' and after == '-', 0, 0, {}
  local twins = queue .. ':twins:' .. redis.sha1hex(task)
  if cursor ~= '-' then
    local found = redis.call('SSCAN', twins, cursor, 'COUNT', page)
    cursor = found[1] == '0' and '-' or found[1]
    for _, id in ipairs(found[2]) do
      local claim, worker = store_cancel_reason(queue, id, reason)
      if claim then
        note(claim, worker)
      elseif redis.call('EXISTS', queue .. ':job:' .. id) == 0 then
        redis.call('SREM', twins, id)
      else
        local waited = cancel_queued(queue, id, ttl, reason)
        jobs, ids[#ids + 1] = jobs + waited, waited == 1 and id or nil
      end
    end
  end
  if cursor == '-' and not job_id(task) then
    after = each_claim(queue, holders, after, budget, function(claim, worker)
      if own(redis.pcall('LPOS', queue .. ':claim:' .. claim, task)) then
        note(claim, worker)
      end
    end)
  end
  request_cancels(queue, marked)
  local last = cursor == '-' and after == '-'
  if (first or last) and not job_id(task) then -- in between it would only take time, and be done again
    raw = redis.call('LREM', queue, 0, task)
  end
  count(queue, 'cancelled', raw + jobs, ids)
  wake(queue, count_members(queue))
  give_room(queue)
  reply[1], reply[2], reply[3], reply[4], reply[5] = last and 'ok' or 'more', raw + jobs, #reply - 5, cursor, after
  return reply
end

-- list_jobs: one page of waiting, due, suspended or blocked jobs, each with the cursor of the next page. Waiting jobs are listed in the
-- order in which they will be taken, with raw tasks, and then those of lanes, lane by lane; due and suspended jobs by time; blocked
-- jobs by id.
-- Or waiting jobs from the end, those that will be taken last first: those outside lanes, and then those of lanes, lane by lane.
-- ARGV[1] state waiting, due, suspended or blocked
-- ARGV[2] limit places to look at
-- ARGV[3] after cursor of the last entry of the page before, empty for the first page
-- ARGV[4] max_bytes bytes of payload after which no further entry is listed
-- ARGV[5] from_end 1: waiting jobs from the end
-- RETURNS ok entry... | more entry...; an entry is its cursor, its summary and, if it waits, its place: how many references are
--   up to it in its lane, or outside lanes; or only a cursor, for a position that was skipped
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_jobs()
  local queue = KEYS[1]
  local state, limit, after = ARGV[1], tonumber(ARGV[2]), ARGV[3]
  local max_bytes, from_end = tonumber(ARGV[4]), ARGV[5] == '1'
  local suspects, due, blocked, counts = queue .. ':suspects', queue .. ':due', queue .. ':blocked', queue .. ':counts'

  local reply, budget, listed, _ = {'ok'}, {left = max_bytes}, {}, redis.call('LLEN', queue) -- an error if it is no list

  -- Lists the `item` at one position, if it is in this state; returns false if the page is full. `nth`: its place, nil if it does not wait.
  local function list(cursor, item, nth)
    if #reply > limit or budget.left <= 0 then
      reply[1] = 'more'
      return false
    end
    local id = job_id(item)
    -- A job that was due in between has two positions in the lists, and a cancelled job no longer has the state.
    if (not id or own(redis.pcall('HGET', queue .. ':job:' .. id, 'state')) == state) and not listed[item] then
      reply[#reply + 1] = {cursor, summarize(queue, 'job', item, budget), nth}
      listed[item] = id
    else
      reply[#reply + 1] = {cursor}
    end
    budget.left = budget.left - (id and 0 or #item)
    return true
  end

  -- Lists one list. `last`: the position that was listed last, from the front (nil: none).
  local function list_positions(name, key, last, claimed, lane)
    local length, ahead = own(redis.pcall('LLEN', key)) or 0, name == 'queue' and own(redis.pcall('LLEN', suspects)) or 0
    local first = from_end and math.max(0, length - (last or length)) or math.max(0, (last or -1) + 1)
    return length == 0 or read_items(key, first, not from_end, max_bytes, function(item, i)
      local position = from_end and length - 1 - i or i
      local cursor = string.format('%s %d %.0f', name, position, claimed) .. (lane and ' ' .. lane or '')
      return list(cursor, item, ahead + position + 1)
    end)
  end

  if state == 'waiting' then
    -- A position is counted from the front: tasks added at the back change no position. Claims move all of them ahead.
    local claimed = whole_number(own(redis.pcall('HGET', counts, 'claimed')), 0)
    local list_name, position, claimed_then, lane = string.match(after, '^(%l+) (%d+) (%d+) ?(.*)$')
    local last, in_lane = tonumber(position), list_name == 'lane'
    if last and not (from_end and in_lane) then -- claims in other lanes would hide tasks that are nearer to the front
      last = last - math.max(0, claimed - (tonumber(claimed_then) or claimed))
    end
    local lists = from_end and {'queue', queue, 'suspects', suspects} or {'suspects', suspects, 'queue', queue}
    if in_lane or (list_name == lists[3] or list_positions(lists[1], lists[2], last, claimed))
      and list_positions(lists[3], lists[4], list_name == lists[3] and last or nil, claimed) then
      each_lane(queue, in_lane and lane or nil, function(name, tasks) -- by name
        return list_positions('lane', tasks, name == lane and last or nil, claimed, name)
      end)
    end
  elseif state == 'due' or state == 'suspended' then
    local times = state == 'due' and due or queue .. ':suspended'
    local score, id = string.match(after, '^([%dinfe.+-]+) (.*)$')
    local behind = score and own(redis.pcall('ZSCORE', times, id)) == score and redis.call('ZREVRANK', times, id)
    local first = behind and redis.call('ZCARD', times) - behind
      or score and own(redis.pcall('ZCOUNT', times, '-inf', '(' .. score)) or 0
    local page = own(redis.pcall('ZRANGE', times, first, first + limit, 'WITHSCORES')) or {}
    for i = 1, #page, 2 do
      list(page[i + 1] .. ' ' .. page[i], MARKER .. page[i])
    end
  else
    -- There are no more blocked jobs than there are running ones, so all of them may be sorted.
    for _, id in ipairs(own(redis.pcall('SORT_RO', blocked, 'ALPHA')) or {}) do
      if id > after and not list(id, MARKER .. id) then
        break
      end
    end
  end
  return reply
end

local MOST_OUTLINES = 3000 -- of one record
local LONGEST_ERROR = 24576 -- with a traceback of 16 KiB

-- Returns the size of a field that may be large, and its beginning: never a value. Of a child, returns what is noted of it. Returns
-- how many bytes were read for it, of `room`.
local function outline(key, name, room)
  local size = redis.call('HSTRLEN', key, name)
  local value = name ~= 'saved' and size <= room and redis.call('HGET', key, name) or ''
  if string.find(name, '^child:') or string.find(name, '^at:') then
    return value, #value
  end
  local is_end, word = string.find(name, '^end:') ~= nil, string.match(value, '^%l+ ?') or ''
  local is_error = string.find(name, '^try:') or word == 'failed '
  local told = is_error and size <= LONGEST_ERROR and value or is_end and string.match(value, '^%l+ %d+ %d+ ') or word
  return digits(size) .. ' ' .. told, #value
end

-- read_job: everything that is stored about one id: its run, the job that waits, its last results, and its dead-letter records.
-- ARGV[1] id of the job
-- ARGV[2] head bytes of each payload that are returned
-- ARGV[3] max_bytes bytes of payload that are read; a longer one is returned as empty
-- ARGV[4] most dead-letter records, the newest first; and other jobs that were plain tasks with this payload
-- RETURNS ok cancelling reserved run job results records twins: cancelling is 1 if the run is to be cancelled, reserved ms until the id
--   is free again (-1: it is not reserved); run and job are records, or false; results are the newest, the one before
--   it, and a kept job, if there is one: each the ms until it expires, then names and values in turn, or false; a record is the bytes of its payload, then names
--   and values in turn; twins are ids. Of what the job saved and was sent, the run, the job and the newest record have up to 3,000
--   fields: instead of the value, its bytes, a space, and its beginning, which says what it is; with the whole of an error. Of a
--   child, the value
-- RESEND safe: it only reads
-- FLAGS no-writes
local function read_job()
  local queue = KEYS[1]
  local id, head, max_bytes, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
  local job, active, result = queue .. ':job:' .. id, queue .. ':active:' .. id, queue .. ':result:' .. id
  local older_result, counts, dead_letter_index = queue .. ':older_result:' .. id, queue .. ':counts', queue .. ':aside'
  local cancelling, taken, room = queue .. ':cancelling', queue .. ':taken:' .. id, max_bytes

  -- Returns the record `key`. A hash field can only be read whole, so that the payload is read if there is room for it.
  local function read_record(key, most_outlines)
    local size = own(redis.pcall('HSTRLEN', key, 'task'))
    if not size or redis.call('EXISTS', key) == 0 then
      return false
    end
    local record, may_read = {size}, size <= max_bytes
    max_bytes = max_bytes - (may_read and size or 0)
    for _, name in ipairs(redis.call('HKEYS', key)) do
      if not is_large_saved(name) or name == 'step:@errors' or name == 'value' then
        local value = (name ~= 'task' or may_read) and redis.call('HGET', key, name) or ''
        record[#record + 1], record[#record + 2] = name, name == 'task' and string.sub(value, 1, head) or value
      elseif most_outlines > 0 then
        local told, bytes = outline(key, name, room)
        record[#record + 1], record[#record + 2] = name, told
        most_outlines, room = most_outlines - 1, room - bytes
      end
    end
    return record
  end

  local RESULT = {'outcome', 'first', 'last', 'kind', 'reason', 'failures', 'attempts', 'progress', 'message',
    'error_type', 'error_message', 'error_traceback', 'error_fields', 'ended', 'tags', 'lane', 'cut', 'size', unpack(KEPT)} -- not the value

  local run = own(redis.pcall('HEXISTS', active, 'claim')) == 1 and read_record(active, MOST_OUTLINES)
  local marked = run and own(redis.pcall('SISMEMBER', cancelling, redis.call('HGET', active, 'claim'))) or 0
  local queued, cleared = own(redis.pcall('HGET', job, 'queued')) or false, whole_number(own(redis.pcall('HGET', counts, 'cleared')), 0, NEVER)
  local kept = queued and whole_number(queued, NEVER, NEVER) > cleared and read_record(job, MOST_OUTLINES)
  local results, records = {}, {}
  for _, found in ipairs({result, older_result, (find_kept(queue, id, 0))}) do
    local key = type(found) == 'string' and found or queue .. ':done:' .. found.first
    local facts = record_fields(found, 'outcome')[1] and {redis.call('PTTL', key)}
    for _, name in ipairs(facts and RESULT or {}) do
      local value = record_fields(found, name)[1]
      facts[#facts + 1], facts[#facts + 2] = name, name == 'task' and value and string.sub(value, 1, head) or value
    end
    results[#results + 1] = facts
  end
  local claim = own(redis.pcall('HGET', dead_letter_index, id))
  while claim and #records < most do
    local record = read_record(queue .. ':aside:' .. claim, #records == 0 and MOST_OUTLINES or 0)
    records[#records + 1] = record or nil
    claim = record and redis.call('HGET', queue .. ':aside:' .. claim, 'older')
  end
  local digest = run and redis.call('HGET', active, 'twin') or kept and redis.call('HGET', job, 'twin')
  local scanned = digest and own(redis.pcall('SSCAN', queue .. ':twins:' .. digest, '0', 'COUNT', most + 1))
  local twins = {}
  for _, twin in ipairs(scanned and scanned[2] or {}) do
    if twin ~= id and #twins < most then
      twins[#twins + 1] = twin
    end
  end
  return {'ok', marked, math.max(-1, redis.call('PTTL', taken)), run, kept, results, records, twins}
end

-- read_payload: the whole payload of a job, of a running task, or of a dead-letter record.
-- ARGV[1] id of the job; not used if there is a claim
-- ARGV[2] claim of a running task, or under which a task failed, or the number of a kept job; empty: the id names the task
-- RETURNS ok task | gone
-- RESEND safe: it only reads
-- FLAGS no-writes
local function read_payload()
  local queue = KEYS[1]
  local id, claim = ARGV[1], ARGV[2]
  local job, active, dead_letter_index = queue .. ':job:' .. id, queue .. ':active:' .. id, queue .. ':aside'

  local task
  if claim == '' then
    claim = own(redis.pcall('HGET', dead_letter_index, id))
    task = own(redis.pcall('HGET', active, 'task')) or own(redis.pcall('HGET', job, 'task'))
  else
    local item = own(redis.pcall('LINDEX', queue .. ':claim:' .. claim, 0))
    local named = item and job_id(item)
    task = item
    if named then
      task = own(redis.pcall('HGET', queue .. ':active:' .. named, 'task'))
    end
  end
  if not task and claim then
    task = own(redis.pcall('HGET', queue .. ':aside:' .. claim, 'task'))
  end
  task = task or id ~= '' and own(redis.pcall('HGET', queue .. ':result:' .. id, 'task'))
  local kept = not task and (claim and read_kept(queue, claim) or not claim and find_kept(queue, id, 0))
  task = task or kept and kept.task
  return task and {'ok', task} or {'gone'}
end

-- job_status: the state of a job and its attempts, also after its end.
-- ARGV[1] number of the dispatch that is meant, 0: the newest
-- ARGV[2] id of the job
-- RETURNS waiting fields | due fields | suspended fields | blocked fields | active fields | finished fields | failed fields | cancelled fields |
--   gone; fields are claim worker run_at progress message failures attempts error_type error_message value, each false if not known
-- RESEND safe: it only reads
-- FLAGS no-writes
local function job_status()
  local queue = KEYS[1]
  local number, id = tonumber(ARGV[1]), ARGV[2]
  local job, active, result = queue .. ':job:' .. id, queue .. ':active:' .. id, queue .. ':result:' .. id
  local older_result, counts = queue .. ':older_result:' .. id, queue .. ':counts'

  -- The fields of the record `key`. `tries`: attempts that the three counters do not count.
  local function status_of(status, key, tries)
    local kept = own(redis.pcall('HMGET', key, 'claim', 'worker', 'run_at', 'progress', 'message', 'failures', 'stalls',
      'timeouts', 'error_type', 'error_message', 'value')) or {}
    local attempts = tries + whole_number(kept[6], 0) + whole_number(kept[7], 0) + whole_number(kept[8], 0)
    return {status, kept[1], kept[2], kept[3], kept[4], kept[5], kept[6], attempts, kept[9], kept[10], kept[11]}
  end

  local found, outcome = find_result(result, older_result, number)
  local live = find_live_record(active, job, counts, number)
  if live and number > 0 and found and first_of(found) > first_of(live) then
    live = nil
  elseif live == active then
    return status_of('active', live, 1)
  end
  local state = live and redis.call('HGET', live, 'state')
  if state == 'waiting' or state == 'due' or state == 'suspended' or state == 'blocked' then
    return status_of(state, live, 0)
  end
  if not found then
    found, outcome = find_kept(queue, id, number)
  end
  if found then
    local kept = record_fields(found, 'progress', 'message', 'failures', 'attempts', 'error_type', 'error_message')
    local aside = outcome == 'failed' and find_dead_letter(queue, id, number)
    local value = aside and redis.call('HGET', aside, 'value')
    return {outcome, false, false, false, kept[1], kept[2], kept[3], whole_number(kept[4], 1), kept[5], kept[6], value or false}
  end
  local aside = find_dead_letter(queue, id, number)
  if aside then
    local reply = status_of('failed', aside, redis.call('HGET', aside, 'reason') == 'broken' and 1 or 0)
    reply[2], reply[3], reply[4] = false, false, false
    return reply
  end
  return {'gone'}
end

-- read_result: returns how a job ended; or that it has not, and whether its result will be kept.
-- ARGV[1] number of the dispatch whose result is wanted, 0: of the newest
-- ARGV[2] id of the job
-- RETURNS wait | never (it has not ended, and nothing will be kept) | gone | replaced (gone, and there is a newer dispatch) |
--   finished kind value | failed type message traceback fields | cancelled reason
-- RESEND safe: it only reads
-- FLAGS no-writes
local function read_result()
  local queue = KEYS[1]
  local number, id = tonumber(ARGV[1]), ARGV[2]
  local job, active, result = queue .. ':job:' .. id, queue .. ':active:' .. id, queue .. ':result:' .. id
  local older_result, counts = queue .. ':older_result:' .. id, queue .. ':counts'

  local found, outcome = find_result(result, older_result, number)
  -- A dispatch that has ended and still has a record failed, and was retried.
  local live = (number == 0 or not found or outcome == 'failed') and find_live_record(active, job, counts, number)
  if live and (number == 0 or not found or first_of(found) <= first_of(live)) then
    local ttl = whole_number(redis.call('HGET', live, 'result_ttl')) or tolerant(function() return longest_result_ttl(queue) end) or 0
    return {(ttl > 0 or redis.call('HEXISTS', live, 'done') == 1) and 'wait' or 'never'}
  end
  if not found then
    -- Whatever its result_ttl, a failed job is known as long as its record is in the dead-letter queue.
    found, outcome = find_dead_letter(queue, id, number), 'failed'
  end
  if not found then
    found, outcome = find_kept(queue, id, number)
  end
  if not found then
    for _, key in ipairs(number > 0 and {active, job, result} or {}) do
      if whole_number(own(redis.pcall('HGET', key, 'first')), 0, NEVER) > number then
        return {'replaced'}
      end
    end
    return {'gone'}
  elseif outcome == 'finished' then
    local value = record_fields(found, 'kind', 'value')
    return {'finished', value[1], value[2]}
  elseif outcome == 'failed' then
    local error = record_fields(found, 'error_type', 'error_message', 'error_traceback', 'error_fields')
    return {'failed', error[1], error[2], error[3], error[4]}
  end
  return {'cancelled', record_fields(found, 'reason')[1]}
end
