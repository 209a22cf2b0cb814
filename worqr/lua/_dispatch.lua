-- A dispatch: its options, and how it stores a new job, changes the job that has its id, or is refused.

-- The record fields that a dispatch may set; the handler's options supply the others.
local POLICY = {'max_failures', 'max_stalls', 'max_timeouts', 'min_backoff', 'max_backoff', 'jitter', 'retry_on',
  'fail_on', 'timeout', 'result_ttl'}

-- The options of a dispatch, each with what it may be. They may come from any client. They are validated before the first
-- write, so that no worker that claims the job and no caller that lists it fails on them.
local OPTION_KINDS = {id = 'id', random = 'random', delay = 'delay', run_at = 'time', unique_for = 'positive',
  max_length = 'whole', at_most = 'whole', lane = 'lane', max_lane_length = 'whole', waiter = 'waiter',
  data = 'boolean', counts = 'boolean', front = 'boolean', policy = 'string',
  when = ' set keep later earlier ', exists = ' update skip raise cancel ', expires = 'digits', expires_at = 'time_text',
  scheduled_for = 'time_text', meta = 'meta', fields = 'fields', batch = 'batch'}

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
-- LATER: most jobs are in no batch.
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
  elseif kind == 'batch' then
    return is_batch(value)
  elseif kind == 'time' or kind == 'delay' then
    return valid_option('whole', value) and value <= (kind == 'time' and LATEST or LONGEST_DELAY)
  elseif kind == 'time_text' then
    return is_digits(value) and tonumber(value) <= LATEST
  elseif string.find(kind, '^ ') then
    return type(value) == 'string' and not string.find(value, ' ') and string.find(kind, ' ' .. value .. ' ', 1, true)
  end
  return type(value) == kind
end

-- Returns what is wrong with the options `o` of a job with the payload `task`, as an error reply; nil if they are valid.
local function invalid_job(o, task)
  if type(o) ~= 'table' or not task then
    return redis.error_reply('ERR a job is its options, a msgpack map, and its task')
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

-- Reads the state of the id `id`. Returns: `job`, if it is waiting, due or blocked; `active`, true while it runs; `taken`,
-- true while the id is reserved; `last`, the newest of its dispatches. A record in the trash does not count; then `trashed`
-- has the reason for the deletion, which holds for the whole id.
local function find_job(base, id)
  local kept = redis.call('HMGET', base .. ':job:' .. id, 'state', 'queued', 'run_at', 'last', 'update_low',
    'update_high', 'update_policy', 'saved_size')
  local active = redis.call('HMGET', base .. ':active:' .. id, 'claim', 'last')
  local cleared = redis.call('HMGET', base .. ':counts', 'cleared', 'cleared_why')
  local trashed = kept[1] and whole_number(kept[2], NEVER, NEVER) <= whole_number(cleared[1], 0, NEVER) and (cleared[2] or '') or nil
  local taken = redis.call('GET', base .. ':taken:' .. id)
  if trashed then
    taken = false
  end
  local seen = {active = active[1] and true, taken = taken and true, trashed = trashed}
  seen.last = active[2] or taken or '0'
  if kept[1] and not trashed then
    seen.job = {state = kept[1], run_at = whole_number(kept[3], 0, LATEST), low = whole_number(kept[5], 0, NEVER), high = whole_number(kept[6], NEVER, NEVER),
      policy = kept[7] or '', has_saved = kept[8] and true}
    seen.last = kept[4]
  end
  return seen
end

-- Returns why the dispatch `o` stores nothing: duplicate (a member of a batch is always a new job), unchanged, full, closed (its
-- part of the batch takes no members of this version any more); or nil. `more`: jobs that are stored before it. If the queue is
-- full, and the producer waits for room, this is noted.
local function refusal(base, o, seen, more)
  if seen.job or seen.active or seen.taken then
    if o.exists == 'raise' or o.batch then
      return 'duplicate'
    elseif o.exists == 'skip' or not seen.job and not seen.active then
      return 'unchanged'
    end
  end
  local full = o.max_length and queued_length(base) + more >= o.max_length or o.max_lane_length and o.lane
    and lane_length(lane_list(base, o.lane, redis.call('HGET', base .. ':lanes', 'epoch'))) >= o.max_lane_length
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
-- LATER: few lanes are strict: in all others, such a job does not wait in its lane.
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
  local ready = enqueue_job(base, id, run_at, now, front, fields[1], fields[2])
  if fields[2] and kept.state == 'waiting' then
    job_left_lane(base, fields[2], id, now)
  end
  return ready
end

-- Returns the due time `asked`, but no later than the time `latest` of the job, which the first dispatch with `at_most`
-- sets. A job that is due after that keeps its time.
-- LATER: few dispatches have at_most.
local function no_later(job, at_most, kept, asked, now)
  redis.call('HSETNX', job, 'latest', digits(now + at_most))
  local latest = whole_number(redis.call('HGET', job, 'latest'), 0)
  return math.min(asked, math.max(kept.run_at, latest))
end

-- Changes the waiting, due or blocked job, field by field as the dispatch says. `kept`: the `job` of find_job. Returns the
-- outcome, and how many tasks became claimable.
-- LATER: most dispatches are new jobs.
local function update_job(base, id, o, task, number, asked, now, kept)
  local job, blocked, fields, gone = base .. ':job:' .. id, kept.state == 'blocked', {last = number}, {}
  asked = o.at_most and no_later(job, o.at_most, kept, asked, now) or asked
  local lower, upper = due_bounds(o.when, asked)
  local run_at = clamp(kept.run_at, lower, upper)
  local changed = o.data ~= false or resets_counters(o) or changes_due_time(o, kept, run_at, asked, now)
  if o.data ~= false then
    fields.task, fields.meta, fields.scheduled_for = task, o.meta, o.scheduled_for
    fields.update_data = blocked and '1' or nil
    gone = {'meta', 'scheduled_for'}
  end
  if run_at ~= kept.run_at or (o.when or 'set') == 'set' then
    changed = changed or changes_expiry(job, o)
    fields.run_at, fields.expires, fields.expires_at = digits(run_at), o.expires, o.expires_at
    gone[#gone + 1], gone[#gone + 2] = 'expires', 'expires_at'
  end
  if resets_counters(o) then
    fields.update_counts = blocked and '1' or nil
    for _, counter in ipairs({'failures', 'stalls', 'timeouts', 'suspect', 'error_type', 'error_message', 'tries'}) do
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
-- LATER: few ids run when they are dispatched.
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
-- LATER: few queues are cleared.
local function delete_trashed_job(base, id, ttl, reason)
  local lane = redis.call('HGET', base .. ':job:' .. id, 'lane')
  delete_cancelled_job(base, id, ttl, reason)
  if lane then
    wake(base, free_places(base, {':' .. id}, now_ms()))
  end
end

-- Stores a new job; blocked, if the same id runs (`seen.active`). Returns the outcome, and how many tasks became claimable.
local function create_job(base, id, o, task, number, asked, now, seen)
  local job = base .. ':job:' .. id
  local fields = {task = task, run_at = digits(asked), queued = number, first = number, last = number, meta = o.meta,
    scheduled_for = o.scheduled_for, expires = o.expires, expires_at = o.expires_at, lane = o.lane,
    latest = o.at_most and digits(now + o.at_most), batch = o.batch and enter_batch(o.batch, id) or nil}
  if o.fields then
    for name, value in pairs(o.fields) do
      fields[name] = value
    end
  end
  if seen.trashed then
    delete_trashed_job(base, id, longest_result_ttl(base), seen.trashed)
  end
  if o.id then
    retire_result(base, id)
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
-- `number`: the dispatch's fencing token, as text. `seen`: the result of find_job, if the script has it.
-- `o`, the options: id (nil: a new one, made with `random`), delay or run_at (ms), when (set, keep, later, earlier),
--   exists (update, skip, raise, cancel), at_most (ms), data, counts, policy (names of fields to replace), fields, meta, front,
--   expires, expires_at, scheduled_for, unique_for, max_length, lane, max_lane_length, waiter (of _room.lua), batch (token, home,
--   id, number, sealed, keep, on_failed)
local function upsert(base, o, task, number, now, seen)
  local id = o.id or new_id(base, number, o.random)
  seen = seen or o.id and find_job(base, id) or {last = number}
  local outcome = refusal(base, o, seen, 0)
  if outcome then
    return outcome, id, seen.last, 0, 0
  end
  if o.exists == 'cancel' and seen.active then
    cancel_running(base, id, 'a later job with its id was dispatched')
  end
  local ready
  local asked = o.run_at or now + (o.delay or 0)
  if seen.job then
    if seen.job.has_saved and o.data ~= false then
      forget_saved_of_other(base .. ':job:' .. id, task)
    end
    outcome, ready = update_job(base, id, o, task, number, asked, now, seen.job)
  else
    outcome, ready = create_job(base, id, o, task, number, asked, now, seen)
  end
  if o.unique_for then
    redis.call('SET', base .. ':taken:' .. id, number, 'PX', digits(o.unique_for))
  end
  return outcome, id, number, ready, seen.job and 0 or 1
end
