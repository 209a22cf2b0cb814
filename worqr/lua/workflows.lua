-- Workflows: jobs whose runs may be suspended until an event, a time or the end of other jobs; their waits and their events.
-- A record with the field `life` is that of a workflow: the number of the dispatch that created it or replaced its payload.
-- The field `open` has the keys of its open waits, in their order, as msgpack. The field `wait:KEY` says what the run waits for, and
-- `end:KEY` how the wait ended: once it is there, every later run gets the same. Events that no wait has taken are in `event:N:NAME`.
-- A suspended job is in the sorted set `:suspended`, by the earliest deadline of its waits. claims.lua lists all fields of a life.

local MOST_WAITS = 1000
local MOST_WAIT_BYTES = 262144 -- of one suspension: keys, names and what is said about them
local FIRST_LOOK = 600000 -- ms after which the children are looked for for which a suspended job waits
local MOST_EVENTS = 1000 -- of one name that no wait has taken
local EVENT_BYTES = 65536

-- True if `value` can be the value of an event: its encoding, a space and the encoded value.
local function is_event_value(value)
  return value == 'none ' or string.find(value, '^json .') ~= nil or string.find(value, '^bytes ') ~= nil
end

-- Returns a wait as a table, from what a worker has sent; nil if that cannot be one. Its deadline: ms since 1970, +MS from now on, or -
-- for none.
local function wait_of(packed, now)
  local read, sent = pcall(cmsgpack.unpack, packed)
  for i = 1, 5 do
    if not read or type(sent) ~= 'table' or type(sent[i]) ~= 'string' then
      return nil
    end
  end
  local key, kind, name, about, deadline = sent[1], sent[2], sent[3], sent[4], sent[5]
  local ms = string.match(deadline, '^%+?(%d+)$')
  local has_time = deadline == '-' and kind ~= 'sleep' or ms and is_digits(ms)
  local is_known = kind == 'sleep' or kind == 'event' and is_line(name) or (kind == 'children' or kind == 'first') and about ~= ''
  if not (is_line(key) and has_time and is_known) or name ~= '' and not is_line(name) then
    return nil
  end
  local at = ms and digits(math.min(tonumber(ms) + (string.sub(deadline, 1, 1) == '+' and now or 0), LATEST)) or '-'
  return {key = key, kind = kind, name = name, about = about, deadline = at}
end

-- Returns the keys in the field `open` of a record, in their order. Another program may have written anything there.
local function open_waits(packed)
  local read, keys = pcall(cmsgpack.unpack, packed or '\144')
  local found = {}
  for i = 1, read and type(keys) == 'table' and math.min(#keys, MOST_WAITS) or 0 do
    found[#found + 1] = type(keys[i]) == 'string' and keys[i] or nil
  end
  return found
end

-- Stores the keys of the open waits in the record `key`.
local function store_open(key, keys)
  if #keys > 0 then
    redis.call('HSET', key, 'open', cmsgpack.pack(keys))
  else
    redis.call('HDEL', key, 'open')
  end
end

-- Returns the wait in the field `wait:KEY` of a record: its kind, when it began, its deadline (nil: none), the name of its event and
-- what else is said about it. Returns nil if there is none, or if another program has written something else.
local function parsed_wait(text)
  local kind, began, deadline, event, about = string.match(text or '', '^(%l+) (%d+) (%S+)\n([^\n]*)\n(.*)$')
  return kind, began, whole_number(deadline, nil, LATEST), event, about
end

-- Returns the wait that is stored under `name` in the record `key`, as parsed_wait does.
local function read_wait(key, name)
  return parsed_wait(redis.call('HGET', key, 'wait:' .. name))
end

-- Returns how many events of a name were taken by waits, and how many have been sent.
local function event_counts(key, name)
  local taken, total = string.match(redis.call('HGET', key, 'events:' .. name) or '', '^(%d+) (%d+)$')
  taken, total = whole_number(taken, 0), whole_number(total, 0)
  return math.max(math.min(taken, total), total - MOST_EVENTS), total
end

-- Takes the next event of a name out of the record `key`. Returns its value, or nil.
local function take_event(key, name)
  local taken, total = event_counts(key, name)
  while taken < total do
    taken = taken + 1
    local field = 'event:' .. digits(taken) .. ':' .. name
    local value = redis.call('HGET', key, field)
    redis.call('HSET', key, 'events:' .. name, digits(taken) .. ' ' .. digits(total))
    if value then
      redis.call('HDEL', key, field)
      return value
    end
  end
  return nil
end

-- True if the record `key` has an end for each of the keys in `children`, one a line.
local function all_ended(key, children)
  for child in string.gmatch(children, '[^\n]+') do
    if redis.call('HEXISTS', key, 'end:' .. child) == 0 then
      return false
    end
  end
  return true
end

-- Returns which of the keys in `children`, one a line, the record `key` has got an end for first; nil if it has none.
local function first_ended(key, children)
  local first, first_at = nil, nil
  for child in string.gmatch(children, '[^\n]+') do
    if redis.call('HEXISTS', key, 'end:' .. child) == 1 then
      local at, took = string.match(redis.call('HGET', key, 'at:child:' .. child) or '', '^%d+ (%d+) (%d+)$')
      local ended = whole_number(at, 0, LATEST) + whole_number(took, 0, LATEST)
      if not first or ended < first_at then
        first, first_at = child, ended
      end
    end
  end
  return first
end

-- Returns the outcome of a wait of the record `key`, and its value: that of its event, or the key of the child that ended first; nil if
-- it goes on. An event that is there counts, even if the deadline has passed. `over`: true if the life is over.
local function outcome_of(key, kind, deadline, event, about, over, now)
  local value = kind == 'event' and take_event(key, event) or kind == 'first' and first_ended(key, about)
  if value then
    return 'value', value
  elseif kind == 'children' and all_ended(key, about) then
    return 'ended', ''
  elseif deadline and deadline <= now then
    return 'timeout', ''
  end
  return over and 'lifetime' or nil, ''
end

-- Binds the open waits of the record `key`: stores how those have ended whose event, time or children are there. A wait that another
-- program has spoilt is dropped: the run will wait again.
local function bind_waits(key, now)
  local kept = redis.call('HMGET', key, 'open', 'lives_until', 'entries', 'saved_size')
  local lives_until, size = whole_number(kept[2], nil, LATEST), whole_number(kept[4], 0)
  local left, over = {}, lives_until and lives_until <= now
  for _, name in ipairs(open_waits(kept[1] or nil)) do
    local kind, began, deadline, event, about = read_wait(key, name)
    local outcome, value
    if kind then
      outcome, value = outcome_of(key, kind, deadline, event, about, over, now)
    end
    if outcome then
      redis.call('HSET', key, 'end:' .. name, table.concat({outcome, digits(now), digits(whole_number(kept[3], 0)), value}, ' '),
        'wait:' .. name, table.concat({kind, began, deadline and digits(deadline) or '-'}, ' ') .. '\n' .. event .. '\n')
      size = size + (outcome == 'value' and kind == 'event' and 0 or STEP_BYTES) -- an event counts since it was sent
      redis.call('HSET', key, 'saved_size', digits(size))
    elseif kind then
      left[#left + 1] = name
    end
  end
  store_open(key, left)
end

-- Forgets in the record `key` that a wait for children has ended, if one of them is tried again: after a put-back, it has no end.
local function reopen_children(key, wait)
  local ended = wait.kind == 'children' and redis.call('HGET', key, 'end:' .. wait.key)
  if ended and string.find(ended, '^ended ') and not all_ended(key, wait.about) then
    local size = whole_number(redis.call('HGET', key, 'saved_size'), 0) - STEP_BYTES
    redis.call('HDEL', key, 'end:' .. wait.key)
    redis.call('HSET', key, 'saved_size', digits(math.max(0, size)))
  end
end

-- Replaces the open waits of the record `key` by those of this suspension. One that is repeated keeps its beginning and its deadline.
-- Returns the keys of those that are new.
local function replace_waits(key, waits, now)
  local before, new, keys, repeated = open_waits(redis.call('HGET', key, 'open') or nil), {}, {}, {}
  for _, name in ipairs(before) do
    repeated[name] = false
  end
  for _, wait in ipairs(waits) do
    reopen_children(key, wait)
    local kind, began, deadline = read_wait(key, wait.key)
    local goes_on, is_open = kind == wait.kind, redis.call('HEXISTS', key, 'end:' .. wait.key) == 0
    new[#new + 1] = is_open and repeated[wait.key] == nil and wait.key or nil
    if goes_on then
      wait.deadline = deadline and digits(deadline) or '-'
    end
    if is_open then
      redis.call('HSET', key, 'wait:' .. wait.key, table.concat({wait.kind, goes_on and began or digits(now), wait.deadline}, ' ')
        .. '\n' .. wait.name .. '\n' .. wait.about)
      keys[#keys + 1] = wait.key
    end
    repeated[wait.key] = true
  end
  for _, name in ipairs(before) do
    if not repeated[name] then
      redis.call('HDEL', key, 'wait:' .. name, 'at:wait:' .. name)
    end
  end
  store_open(key, keys)
  return new
end

-- Stores in the record `key` that these new waits are its entry `number`.
local function note_waits(key, new, number, now)
  local times = {}
  for _, name in ipairs(new) do
    times['at:wait:' .. name] = time_of_entry(number, now)
  end
  write_hash(key, times)
end

-- Lets the failures of those children for which a run begins to wait come after its entry `number`, which is this wait, if nothing else
-- was stored after them. So a put-back drops them, as those that come while the run is suspended.
local function fail_after(key, waits, number)
  for _, wait in ipairs(waits) do
    for child in string.gmatch((wait.kind == 'children' or wait.kind == 'first') and wait.about or '', '[^\n]+') do
      local outcome, at, stored, value = string.match(redis.call('HGET', key, 'end:' .. child) or '', '^(%l+) (%d+) (%d+) (.*)$')
      if outcome and outcome ~= 'finished' and outcome ~= 'large' and tonumber(stored) == number - 1 then
        redis.call('HSET', key, 'end:' .. child, table.concat({outcome, at, digits(number), value}, ' '))
      end
    end
  end
end

-- Returns the reply `ready` with the names and values of the stored ends of these waits, and of the children of which they are: also
-- of those that a run asks for again, though it could know them. Returns nil if no wait has ended.
local function ready_reply(key, waits)
  local ends, told, is_ready = {'ready'}, {}, false
  local function tell(name)
    local fact = not told[name] and redis.call('HGET', key, 'end:' .. name)
    if fact then
      ends[#ends + 1], ends[#ends + 2], told[name] = 'end:' .. name, fact, true
    end
  end
  for _, wait in ipairs(waits) do
    tell(wait.key)
    is_ready = is_ready or told[wait.key]
    for child in string.gmatch((wait.kind == 'children' or wait.kind == 'first') and wait.about or '', '[^\n]+') do
      tell(child)
    end
  end
  return is_ready and ends or nil
end

-- Returns the earliest deadline of the open waits of the record `key`, or the end of its life; LATEST if there is none.
local function earliest_deadline(key)
  local kept = redis.call('HMGET', key, 'open', 'lives_until')
  local first = whole_number(kept[2], LATEST, LATEST)
  for _, name in ipairs(open_waits(kept[1] or nil)) do
    local _, _, deadline = read_wait(key, name)
    first = math.min(first, deadline or LATEST)
  end
  return first
end

-- Returns what a suspended job waits for, for people: the names of its first waits.
local function described_waits(waits)
  local names = {}
  for i = 1, math.min(#waits, 5) do
    names[i] = waits[i].name ~= '' and waits[i].name or waits[i].key
  end
  return table.concat(names, ', ') .. (#waits > 5 and ', ...' or '')
end

-- Puts the job `id` among the suspended ones until `deadline`; the leader looks at it at `look_at`, which is not later. In a strict
-- lane, its reference goes to the front: nothing of the lane starts while it is suspended. Returns how many tasks became claimable.
local function set_suspended(base, id, lane, deadline, look_at, now)
  local job, suspended = base .. ':job:' .. id, base .. ':suspended'
  redis.call('HSET', job, 'state', 'suspended')
  set_field(job, 'run_at', deadline < LATEST and digits(deadline))
  redis.call('ZADD', suspended, digits(look_at), id)
  if look_at < LATEST and redis.call('ZRANGE', suspended, 0, 0)[1] == id then
    announce_moment(base, math.max(0, look_at - now))
  end
  notify(base, id, 'suspended')
  return lane and is_strict(base) and push_to_lane(base, lane, MARKER .. id, true, now) or 0
end

-- True if a strict lane has the reference of a suspended job in front.
local function holds_lane(base, lane, id)
  if not lane or not is_strict(base) then
    return false
  end
  local list = lane_list(base, lane, redis.call('HGET', base .. ':lanes', 'epoch'))
  return lane_length(list) > 0 and redis.call('LPOS', list, MARKER .. id, 'RANK', -1, 'MAXLEN', PASSED_OVER)
end

-- Puts a suspended job into the queue. Returns how many tasks became claimable.
local function wake_suspended(base, id, now)
  local job = base .. ':job:' .. id
  redis.call('ZREM', base .. ':suspended', id)
  local kept = own(redis.pcall('HMGET', job, 'state', 'suspect', 'lane')) or {}
  if kept[1] ~= 'suspended' then
    return 0
  end
  redis.call('HSET', job, 'run_at', digits(now))
  if holds_lane(base, kept[3], id) then
    redis.call('HSET', job, 'state', 'waiting')
    notify(base, id, 'waiting')
    return retry_now(base, id, now)
  end
  return enqueue_job(base, id, now, now, false, kept[2], kept[3])
end

-- Puts up to `limit` suspended jobs into the queue, of which the deadline of a wait has passed, or looks for their children. Returns how
-- many can be claimed now.
local function wake_overdue(base, limit, now)
  local pushed = 0
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', base .. ':suspended', '-inf', digits(now), 'LIMIT', 0, limit)) do
    local job = base .. ':job:' .. id
    local deadline = own(redis.pcall('HLEN', job)) and earliest_deadline(job) or now
    local missing = deadline > now and missing_children(job) or {}
    if #missing > 0 then
      look_for_children(base, id, missing, deadline, now)
    else
      pushed = pushed + wake_suspended(base, id, now)
    end
  end
  return pushed
end

-- True if the suspended record `key` has an open wait for an event of this name.
local function waits_for_event(key, name)
  for _, wait in ipairs(open_waits(redis.call('HGET', key, 'open') or nil)) do
    local kind, _, _, event = read_wait(key, wait)
    if kind == 'event' and event == name then
      return true
    end
  end
  return false
end

-- Returns the key of the record of a job that has not ended, and its state: that of the dispatch `number` (0: any), and of the
-- `life` (0: any). Returns nil and the state in which the job is found otherwise.
local function find_workflow(base, id, number, life)
  local active, job, counts = base .. ':active:' .. id, base .. ':job:' .. id, base .. ':counts'
  local key = find_live_record(active, job, counts, number)
  if life > 0 then
    key = nil
    for _, each in ipairs({active, job}) do
      local is_it = whole_number(own(redis.pcall('HGET', each, 'life')), 0, NEVER) == life
      key = key or is_it and find_live_record(active, job, counts, life) == each and each or nil
    end
  end
  if not key then
    number = number > 0 and number or life
    local _, outcome = find_result(base .. ':result:' .. id, base .. ':older_result:' .. id, number)
    return nil, outcome or find_dead_letter(base, id, number) and 'failed' or 'gone'
  end
  local kept = redis.call('HMGET', key, 'life', 'state', 'claim')
  if not kept[1] then
    return nil, 'plain'
  elseif key == active and own(redis.pcall('SISMEMBER', base .. ':cancelling', kept[3] or '')) == 1 then
    return nil, 'cancelled'
  end
  return key, kept[2]
end

-- suspend_task: ends a claim until something happens for which its run waits: an event, a time, the ends of other jobs. The attempt is
-- not counted. If one of them is there, the worker keeps the claim. A task that waits becomes a job.
-- ARGV[1] worker id
-- ARGV[2] claim id
-- ARGV[3] progress 1: the run has asked for all entries that it found; if it waits for something else than before, the counters fall
-- ARGV[4..] waits msgpack of an array of texts: key, kind (event, sleep, children: all of them, first: one of them), name of the event or
--   empty, about (the schema of the event, or the keys of the children, one a line), deadline (ms since 1970, +MS from now on, - for
--   none); 1 to 1,000 of them
-- RETURNS ready field... (names and values of the ends of the waits, and of their children, in turn) | suspended |
--   full (more is kept, or waited for, than a job may) | cancelled | dropped (the queue was deleted) | gone | mine | lost
-- RESEND safe: fenced by the claim; a wait that has ended stays as it is, and ready is returned again
-- GROUP seldom
-- FLAGS allow-oom
local function suspend_task()
  local queue = KEYS[1]
  local worker, claim, progress = ARGV[1], ARGV[2], ARGV[3] == '1'
  local workers, claims, cancelling = queue .. ':workers', queue .. ':claims:' .. worker, queue .. ':cancelling'

  check_types(queue)
  check_dead_letter_types(queue, worker)
  local waits, bytes, now = {}, 0, now_ms()
  for i = 4, #ARGV do
    local wait = ARGV[i]
    waits[#waits + 1], bytes = wait_of(wait, now) or false, bytes + #wait
    if not waits[#waits] then
      return redis.error_reply('ERR a wait is an array of a key, a kind, a name, what it is about, and a deadline: this one cannot be that')
    end
  end
  if #waits == 0 or #waits > MOST_WAITS then
    return redis.error_reply('ERR a run waits for 1 to 1000 things')
  elseif redis.call('SISMEMBER', claims, claim) == 0 then
    return {unheld_status(workers, worker)}
  end
  local task, release = read_claim(queue, claim), release_as('')
  local is_marked = redis.call('SISMEMBER', cancelling, claim) == 1
  if task and not is_marked and tonumber(claim) > cleared_up_to(queue) then
    local active = queue .. ':active:' .. task.id
    if bytes > MOST_WAIT_BYTES or whole_number(task.fields.saved_size, 0) > 2 * MOST_KEPT then
      return {'full'}
    elseif not task.job then
      become_job(queue, worker, claim, task)
    end
    redis.call('HSETNX', active, 'life', task.fields.first or claim)
    local new = replace_waits(active, waits, now)
    if #new > 0 then
      local number = note_entry(queue, worker, active, progress)
      note_waits(active, new, number, now)
      fail_after(active, waits, number)
    end
    bind_waits(active, now)
    local ready = ready_reply(active, waits)
    if ready then
      return ready
    end
    release.suspended_until, release.retry_message = earliest_deadline(active), described_waits(waits)
    release.look_at = math.min(release.suspended_until, #missing_children(active) > 0 and now + FIRST_LOOK or LATEST)
  end

  redis.call('SREM', claims, claim)
  local status, ready, id = release_claim(queue, claim, release, worker_policy(queue, worker), now)
  count(queue, 'suspended', status == 'given' and 1 or 0, {id})
  wake(queue, math.max(ready + count_members(queue), free_room(queue, {claim})))
  wake_for_suspects(queue)
  return {status == 'given' and 'suspended' or status}
end

-- send_event: stores a value for a workflow that has not ended, under the name of the event; wakes it if it is suspended and waits for
-- that. It never starts a job.
-- ARGV[4] id of the job
-- ARGV[5] number of the dispatch that is meant, 0: any
-- ARGV[6] life that is meant, 0: any
-- ARGV[7] name of the event
-- ARGV[8] value its encoding (json, bytes or none), a space and the encoded value
-- ARGV[9] again 1: also if an event of this name is there that no wait has taken
-- RETURNS woke | stored | already (one is there that no wait has taken) | full (so many are there, or the value is too large, or the
--   job keeps too much) | none state (failed, finished, cancelled, gone; plain: the job is no workflow) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function send_event()
  local queue = KEYS[1]
  local id, number, life, name = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
  local value, again = ARGV[8], ARGV[9] == '1'

  check_types(queue)
  if not (is_line(name) and is_event_value(value)) then
    return redis.error_reply('ERR an event has a name of one line, and a value: json, bytes or none, a space, and the encoded value')
  end
  local key, state = find_workflow(queue, id, number, life)
  if not key then
    return {'none', state}
  end
  local taken, total = event_counts(key, name)
  local size = whole_number(redis.call('HGET', key, 'saved_size'), 0) + saved_bytes(name, #value)
  if taken < total and not again then
    return {'already'}
  elseif total - taken >= MOST_EVENTS or #value > EVENT_BYTES or size > MOST_KEPT then
    return {'full'}
  end
  redis.call('HSET', key, 'event:' .. digits(total + 1) .. ':' .. name, value, 'saved_size', digits(size),
    'events:' .. name, digits(taken) .. ' ' .. digits(total + 1))
  if state ~= 'suspended' or not waits_for_event(key, name) then
    notify(queue, id, 'event')
    return {'stored'}
  end
  wake(queue, wake_suspended(queue, id, now_ms()))
  return {'woke'}
end

-- end_wait: ends an open wait of a workflow now, as if its time were over. The wait of a run that goes on is ended when that run waits
-- again.
-- ARGV[4] id of the job
-- ARGV[5] number of the dispatch that is meant, 0: any
-- ARGV[6] life that is meant, 0: any
-- ARGV[7] key of the wait
-- RETURNS woke | ended | closed (no such wait is open) | children (it waits for jobs: they are to be cancelled) | none state (as
--   send_event) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function end_wait()
  local queue = KEYS[1]
  local id, number, life, key = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]

  check_types(queue)
  local record, state = find_workflow(queue, id, number, life)
  if not record then
    return {'none', state}
  end
  local is_open = false
  for _, each in ipairs(open_waits(redis.call('HGET', record, 'open') or nil)) do
    is_open = is_open or each == key
  end
  local kind, began, _, event, about = read_wait(record, key)
  if not (is_open and kind) then
    return {'closed'}
  elseif kind == 'children' then
    return {'children'}
  end
  local now = now_ms()
  redis.call('HSET', record, 'wait:' .. key, table.concat({kind, began, digits(now)}, ' ') .. '\n' .. event .. '\n' .. about)
  if state ~= 'suspended' then
    return {'ended'}
  end
  wake(queue, wake_suspended(queue, id, now))
  return {'woke'}
end

-- rewind_job: drops the entry KEY of a workflow that does not run, and all that its runs have stored later; cancels the jobs that were
-- dropped and have not ended; puts the workflow into the queue. It runs again from there. One in the dead-letter queue is put back.
-- ARGV[4] id of the job
-- ARGV[5] number of the dispatch that is meant, 0: any
-- ARGV[6] life that is meant, 0: any
-- ARGV[7] key of the step, the wait or the job with which to begin again
-- RETURNS ok dropped cancelled (how many entries, how many jobs) | active (it runs) | unknown key... (there is no such entry; up to
--   100 that there are) | unordered key (an older version has stored this entry, and not when) | taken (another job has its id) |
--   closing (its batch is being cancelled) | none state (as send_event, without failed) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function rewind_job()
  local queue = KEYS[1]
  local id, number, life, key = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]

  check_types(queue)
  local record, state = find_workflow(queue, id, number, life)
  local aside = state == 'failed' and find_dead_letter(queue, id, number > 0 and number or life)
  if record == queue .. ':active:' .. id or state == 'blocked' then
    return {'active'}
  end
  local fields = (record or aside) and read_hash(record or aside)
  if not fields or not fields.life then
    return {'none', aside and 'plain' or state}
  end
  local seen, batch, stays = aside and find_job(queue, id), nil, nil
  if aside and (seen.job or seen.active) then
    return {'taken'}
  elseif aside and fields.batch then
    batch, stays = batch_to_rejoin(queue, fields.batch)
  end
  if stays then
    return {'closing'}
  end
  local left, dropped, running = drop_entries(fields, key)
  if not left then
    return dropped
  end
  local now = now_ms()
  local ready
  if aside then
    ready = put_back_alone(queue, string.match(aside, '%d+$'), left, batch, seen, now)
  else
    replace_hash(record, fields, left)
    ready = stand_in_line(queue, id, state, now)
  end
  for _, child in ipairs(running) do
    cancel_one_child(queue, child, id, fields.life, 'its workflow runs again from an earlier entry')
  end
  wake(queue, ready + count_members(queue))
  return {'ok', dropped, #running}
end

-- refuse_event: sets the event aside that a wait of a run has taken, because it is not what the run waits for. The wait is open again.
-- ARGV[1] worker id
-- ARGV[2] claim id
-- ARGV[3] key of the wait
-- RETURNS ok | lost
-- RESEND safe: fenced by the claim; a wait that is open stays as it is
-- FLAGS allow-oom
local function refuse_event()
  local queue = KEYS[1]
  local worker, claim, key = ARGV[1], ARGV[2], ARGV[3]
  local claims = queue .. ':claims:' .. worker

  local item = redis.call('SISMEMBER', claims, claim) == 1 and own(redis.pcall('LINDEX', queue .. ':claim:' .. claim, 0))
  local id = item and job_id(item)
  local active = id and queue .. ':active:' .. id
  if not active or own(redis.pcall('HGET', active, 'claim')) ~= claim then
    return {'lost'}
  end
  local ended = redis.call('HGET', active, 'end:' .. key) or ''
  local value = string.match(ended, '^value %d+ %d+ (.*)$')
  if value then
    local open, _, _, _, event = open_waits(redis.call('HGET', active, 'open') or nil), read_wait(active, key)
    local before = redis.call('HGET', active, 'refused:' .. key)
    if before then
      local size = whole_number(redis.call('HGET', active, 'saved_size'), 0) - saved_bytes(event or '', #before)
      redis.call('HSET', active, 'saved_size', digits(math.max(0, size)))
    end
    open[#open + 1] = key
    redis.call('HSET', active, 'refused:' .. key, value)
    redis.call('HDEL', active, 'end:' .. key)
    store_open(active, open)
  end
  return {'ok'}
end
