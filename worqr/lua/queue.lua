-- A queue as a whole: the types of its keys, its counters and events, the wake-ups of its workers, and its clearing.
-- In all modules `base` is the key of the queue's list. The queue's other keys and channels begin with it.

-- Reads the keys of a queue that its scripts write. So a key of a wrong type, written by another application, is an error
-- before the first write.
local function check_types(base)
  redis.call('LLEN', base)
  redis.call('LLEN', base .. ':suspects') -- on which producers have the right to no other command that asks
  redis.call('SCARD', base .. ':hungry')
  redis.call('HLEN', base .. ':workers')
  redis.call('HLEN', base .. ':counts')
  redis.call('ZCARD', base .. ':due')
  redis.call('ZCARD', base .. ':result_ttls')
  if redis.call('EXISTS', base .. ':aside', base .. ':failed', base .. ':broken') > 0 then
    redis.call('HLEN', base .. ':aside')
    redis.call('ZCARD', base .. ':failed')
    redis.call('ZCARD', base .. ':broken')
  end
  if redis.call('EXISTS', base .. ':cancelling', base .. ':blocked', base .. ':limits', base .. ':limited', base .. ':lanes',
    base .. ':lanes:rules', base .. ':suspended') > 0 then
    check_rare_types(base)
  end
end

-- Like check_types, for keys that most queues do not have.
local function check_rare_types(base)
  redis.call('ZCARD', base .. ':suspended')
  redis.call('SCARD', base .. ':cancelling')
  redis.call('SCARD', base .. ':blocked')
  redis.call('HLEN', base .. ':limits')
  redis.call('SCARD', base .. ':limited')
  if redis.call('EXISTS', base .. ':lanes', base .. ':lanes:rules') > 0 then
    check_lane_types(base)
  end
end

-- Like check_types, for the keys of lanes.
local function check_lane_types(base)
  redis.call('HLEN', base .. ':lanes')
  redis.call('HLEN', base .. ':lanes:rules')
  redis.call('HLEN', base .. ':lanes:claims')
  redis.call('HLEN', base .. ':lanes:running')
  redis.call('ZCARD', base .. ':lanes:ring')
  redis.call('ZCARD', base .. ':lanes:held')
  redis.call('ZCARD', base .. ':lanes:idle')
  redis.call('ZCARD', base .. ':lanes:names')
  redis.call('ZCARD', base .. ':lanes:opens')
end

local COUNTS_EXPIRE = 2592000 -- s after a field was added: 30 days

-- Renews the expiry of the counters, which is set when a field is added. While tasks are claimed, this happens when less
-- than half of it is left: EXPIRE goes to every replica and to the append-only file, PTTL does not.
local function renew_counts(base)
  if redis.call('PTTL', base .. ':counts') < COUNTS_EXPIRE * 500 then
    redis.call('EXPIRE', base .. ':counts', COUNTS_EXPIRE)
  end
end

-- Does the same if `last`, the fencing token that was assigned before (its clock in microseconds), is of another hour than `now`
-- (ms). Between two calls in one hour little of the 30 days passes, and the script need not ask.
local function renew_hourly(base, last, now)
  if math.floor(last / 3600000000) ~= math.floor(now / 3600000) then
    renew_counts(base)
  end
end

-- Returns how the first 100 of the runs `ends` ended, as text: a line with the lengths of all values, -1 for none, and the values
-- without anything between them, at most 1 KiB of each. An end is the worker, the id of a job (false: a plain task), the payload, its
-- result (the words kind and value, each in front of what it is), the type and the message of its error.
local function packed_ends(ends)
  local lengths, values = {}, {}
  for n = 1, math.min(#ends, 100) do
    local worker, id, task, result, error_type, error_message = unpack(ends[n])
    local kind = result and result[2] ~= 'none' and result[2]
    local value_of = kind and result[4]
    for _, value in ipairs({worker, id, not id and task, kind, value_of, error_type or false, error_message or false}) do
      values[#values + 1] = value and string.sub(value, 1, 1024) or ''
      lengths[#lengths + 1] = value and #values[#values] or -1
    end
  end
  return table.concat(lengths, ' ') .. '\n' .. table.concat(values)
end

-- Adds `n` to the counter `field` of the queue and publishes the queue event, with the first 100 ids. `ids`: those of the
-- jobs (nil: none). `reply`, instead of ids: the reply of a start, where the entry of a job ends with its id.
-- `subscribers`: the reply of NUMSUB for the queue's events, if the script asked before it collected ids (nil: ask).
-- `ends`: of each run that has ended, see packed_ends, for those who listen to these too (nil: none).
local function count(base, field, n, ids, subscribers, reply, ends)
  if n == 0 then
    return
  end
  local sum = redis.pcall('HINCRBY', base .. ':counts', field, n) -- as add_to, without a call: nearly every script counts
  if type(sum) ~= 'number' then
    own(sum, 'integer', 'overflow')
    redis.call('HSET', base .. ':counts', field, n)
  end
  if sum == n or type(sum) ~= 'number' then
    redis.call('EXPIRE', base .. ':counts', COUNTS_EXPIRE)
  end
  local events = base .. ':events'
  subscribers = subscribers or ends and redis.pcall('PUBSUB', 'NUMSUB', events, base .. ':event_ends')
    or redis.pcall('PUBSUB', 'NUMSUB', events)
  if not subscribers[2] or subscribers[2] == 0 then
    return
  end
  local event, named = field .. ' ' .. string.format('%.0f', n), {}
  for _, entry in ipairs(reply or ids or named) do
    local id = not reply and entry or type(entry) == 'table' and entry[#entry]
    named[#named + 1] = id and #named < 100 and id or nil
  end
  if #named > 0 then -- first, on a channel of its own: subscribers without ids still get the plain event
    redis.pcall('PUBLISH', base .. ':event_ids', event .. '\n' .. table.concat(named, '\n'))
  end
  if ends and #ends > 0 and (subscribers[4] or 0) > 0 then
    redis.pcall('PUBLISH', base .. ':event_ends', event .. '\n' .. packed_ends(ends))
  end
  redis.pcall('PUBLISH', events, event)
end

-- Adds `n` to the counter `field` and publishes no event: for what is part of an end that is counted, with its event, as retried
-- or failed.
local function tally(base, field, n)
  if add_to(base .. ':counts', field, n) == n then
    redis.call('EXPIRE', base .. ':counts', COUNTS_EXPIRE)
  end
end

-- Returns the fencing token of the last clearing, 0 if there was none.
local function cleared_up_to(base)
  return whole_number(redis.call('HGET', base .. ':counts', 'cleared'), 0, NEVER)
end

-- Adds `n` (may be negative) to the number of references in the lists whose record is gone. Publishes no event. The number
-- is never below 0: references of foreign producers, or from before the counters expired, were not counted.
local function add_stale(base, n)
  if n ~= 0 then
    local stale = whole_number(redis.call('HGET', base .. ':counts', 'stale'), 0) + n
    if stale > 0 then
      redis.call('HSET', base .. ':counts', 'stale', stale)
      renew_counts(base)
    else
      redis.call('HDEL', base .. ':counts', 'stale')
    end
  end
end

-- Subtracts `n` references without a record that were removed from the lists. With nothing `left` in the lists, there are
-- none.
local function remove_stale(base, n, left)
  add_stale(base, -n)
  if left == 0 then
    redis.call('HDEL', base .. ':counts', 'stale')
  end
end

-- Calls look(item, i) for the items of a list from position `first` on, until it returns false: from the front, where the next
-- task is taken, or from the back. Returns false if look did. LINDEX walks to each position, in a long list for 35 us. So
-- LRANGE reads several items at once: more each time, as long as `max_bytes` would hold as many of the largest so far.
local function read_items(key, first, from_front, max_bytes, look)
  local length, i, step, largest = redis.call('LLEN', key), first, 1, 1
  while i < length do
    local last = math.min(i + step, length) - 1
    local items = redis.call('LRANGE', key, from_front and -1 - last or i, from_front and -1 - i or last)
    for n = 1, #items do
      local item = items[from_front and #items + 1 - n or n]
      largest = math.max(largest, #item)
      if not look(item, i + n - 1) then
        return false
      end
    end
    i, step = last + 1, math.max(1, math.min(2 * step, 50, math.floor(max_bytes / largest)))
  end
  return true
end

local MORE_CLAIMS = 1000 -- that are read: what another application has written may come first

-- Returns the first `limit` claims of a set in their order, or all of them. What another application has written there is left out.
-- Claims have the same number of digits, and a text in the set is no error if they are sorted as texts.
local function claims_in(held, limit)
  local found, most = {}, limit and limit + MORE_CLAIMS or -1
  for _, claim in ipairs(own(redis.pcall('SORT_RO', held, 'ALPHA', 'LIMIT', 0, most)) or {}) do
    found[#found + 1] = #found ~= limit and #claim <= 16 and string.find(claim, '^%d+$') and claim or nil
  end
  return found
end

-- Returns how many tasks wait: the length of the lists, those of the lanes too, without the references whose record is gone. A
-- count of these that is no number, or larger than the lists, counts as zero.
local function waiting_length(base)
  local items = redis.call('LLEN', base) + (own(redis.pcall('LLEN', base .. ':suspects')) or 0)
  items = items + whole_number(own(redis.pcall('HGET', base .. ':lanes', 'waiting')), 0)
  local stale = whole_number(own(redis.pcall('HGET', base .. ':counts', 'stale')), 0)
  return items - (stale <= items and stale or 0)
end

-- Returns how many tasks do not run: waiting, due later, or blocked by the run of their id.
local function queued_length(base)
  return waiting_length(base) + redis.call('ZCARD', base .. ':due') + redis.call('SCARD', base .. ':blocked')
end

-- Wakes up to min(n, 16) waiting workers, each on its own channel. A publish without a receiver moves on to the next
-- worker, 64 attempts at most. A wake-up is a hint, and the leader's scan finds what it misses. If only suspects wait, a
-- worker that runs a suspect is skipped and stays in the set. Of tasks that may not start now, workers hear nothing.
local function wake(base, n)
  if n > 0 and redis.call('EXISTS', base .. ':paused', base .. ':limits') > 0 then
    n = redis.call('SCARD', base .. ':hungry') > 0 and startable(base, n) or 0
  end
  local left, tries, skipped = math.min(n, 16), 64, {}
  local only_suspects = left > 0 and redis.call('LLEN', base) == 0 and redis.call('LLEN', base .. ':suspects') > 0
    and redis.call('EXISTS', base .. ':lanes:ring') == 0
  while left > 0 and tries > 0 do
    local worker = own(redis.pcall('SPOP', base .. ':hungry'))
    if not worker then
      break
    end
    local admission = only_suspects and redis.pcall('HGET', base .. ':workers', worker)
    local suspect = type(admission) == 'string' and string.match(admission, ' (%d+)$')
    if suspect and redis.call('EXISTS', base .. ':claim:' .. suspect) == 1 then
      skipped[#skipped + 1] = worker
    else
      local receivers = redis.pcall('PUBLISH', base .. ':wake:' .. worker, '1')
      if type(receivers) == 'number' and receivers > 0 then
        left = left - 1
      end
    end
    tries = tries - 1
  end
  if #skipped > 0 then
    redis.call('SADD', base .. ':hungry', unpack(skipped))
  end
end

-- Wakes one more worker if a suspect waits: the caller's ended claim may have been the one suspect that a worker may run.
local function wake_for_suspects(base)
  if redis.call('LLEN', base .. ':suspects') > 0 then
    wake(base, 1)
  end
end

local TRASHED_KEYS = {'', ':suspects', ':due', ':suspended', ':blocked'}

-- Moves the lanes to the trash: their names, by which a purge finds their lists. A new epoch of lists begins.
local function clear_lanes(base)
  local lanes = base .. ':lanes'
  if redis.call('EXISTS', base .. ':lanes:names') == 1 then
    redis.call('RENAME', base .. ':lanes:names', base .. ':trash:lanes')
    redis.call('DEL', base .. ':lanes:ring', base .. ':lanes:held')
    for _, field in ipairs(redis.call('HKEYS', lanes)) do
      if field == 'waiting' or field == 'weights' or string.find(field, '^gone:') then
        redis.call('HDEL', lanes, field)
      end
    end
    add_to(lanes, 'epoch', 1)
  end
end

-- Moves everything that waits to the trash in O(1), to be purged in steps, and stores a fencing token. A task that was
-- claimed up to that token and is released later is dropped. Callers that wait for its result receive `why`. Returns how
-- many tasks waited, or nil while an earlier clearing is still to be purged.
local function clear(base, why)
  local trash = base .. ':trash'
  if redis.call('EXISTS', trash, trash .. ':suspects', trash .. ':due', trash .. ':suspended', trash .. ':blocked',
    trash .. ':lanes') > 0 then
    return nil
  end
  redis.call('HLEN', base .. ':counts') -- a key of another type is an error before anything is moved
  redis.call('HLEN', base .. ':lanes')
  local waiting = queued_length(base) + redis.call('ZCARD', base .. ':suspended')
  for _, part in ipairs(TRASHED_KEYS) do
    if redis.call('EXISTS', base .. part) == 1 then
      redis.call('RENAME', base .. part, trash .. part)
    end
  end
  clear_lanes(base)
  local token = next_token(base)
  store_token(base, token)
  redis.call('HSET', base .. ':counts', 'cleared', digits(token), 'cleared_why', why)
  redis.call('HDEL', base .. ':counts', 'stale')
  redis.call('EXPIRE', base .. ':counts', COUNTS_EXPIRE)
  return waiting
end

-- Room: how producers wait until a queue that is full has room for their tasks.
-- The hash `:waiters` has an entry for each call that waits. Its name is CHANNEL-NUMBER, the channel of the program and the number
-- of the call there, or of one of its lanes. Its value is what the call waits for: the max_length, how many tasks need room together,
-- the max_length of their lane, the time in ms, and the lane; a bound that there is not is -.
-- A script that takes tasks out of the queue removes entries for which there is room, and publishes each number on
-- `:room:CHANNEL`. The program asks again then. An entry is a hint: messages may get lost, so a program also asks once a second,
-- which notes it again. So the hash expires soon after the last of them.

local WAITERS_EXPIRE = 10
local MAX_WAITERS = 10000 -- entries; with more, all are dropped, and calls that still wait note themselves again within a second
local WOKEN_PRODUCERS = 16
local BRIEF = 20 -- ms; a call that has waited no longer than this is woken when a part of the queue is free
local FREE_PART = 4 -- a part is a quarter of the bound

-- Returns the name and the number of tasks of `text`, the `waiter` of a request: CHANNEL-NUMBER TASKS. Nil if it is none.
local function parsed_waiter(text)
  local name, tasks = string.match(text, '^(%w+%-%d+) (%d+)$')
  if name and #text <= 64 and tonumber(tasks) > 0 then
    return name, tasks
  end
  return nil
end

-- Notes that a producer waits for room. Another application's value at the key leaves it to ask once a second.
local function note_waiter(base, waiter, max_length, max_lane_length, lane)
  local waiters, name, tasks = base .. ':waiters', parsed_waiter(waiter)
  if (own(redis.pcall('HLEN', waiters)) or 0) >= MAX_WAITERS then
    redis.call('DEL', waiters)
  end
  local bounds = {max_length and digits(max_length) or '-', tasks, max_lane_length and digits(max_lane_length) or '-',
    digits(now_ms()), lane or ''}
  if own(redis.pcall('HSET', waiters, name, table.concat(bounds, ' '))) then
    redis.call('EXPIRE', waiters, WAITERS_EXPIRE)
  end
end

-- Returns the reply to an enqueue of so many `tasks` if the queue has no room for them, else nil and its `waiter` (nil: it does not
-- wait). `text`: the max_length, -1 for none; a space and the name of a call that waits may follow.
local function refuse_enqueue(base, text, tasks)
  local bound, name = string.match(text, '^(-?%d+) ?(.*)$')
  local waiter = bound and name ~= '' and name .. ' ' .. digits(tasks) or nil
  assert(bound and (not waiter or parsed_waiter(waiter)), 'the bound must be a number; the name of a call may follow')
  local waiting, max_length = queued_length(base), tonumber(bound)
  if max_length < 0 or waiting + tasks <= max_length then
    return nil, waiter
  end
  if waiter then
    note_waiter(base, waiter, max_length)
  end
  return {'full', waiting}
end

-- True if `bound` has room for `tasks` more. For a `brief` wait, a part of it must be free before them.
local function bound_allows(bound, waiting, promised, tasks, brief)
  return waiting + promised + tasks <= bound and (not brief or waiting <= bound - math.floor(bound / FREE_PART))
end

-- True if a producer that waits for `wish` has room now. `promised`: for how many tasks others were woken, by lane, and in all
-- under the name ''. Counts the tasks of this one, if it has room.
local function has_room(base, wish, length, promised, now)
  local bound, tasks, lane_bound, since, lane = string.match(wish, '^(%S+) (%d+) (%S+) (%d+) (.*)$')
  bound, tasks, lane_bound = tonumber(bound or ''), tonumber(tasks or '') or 0, tonumber(lane_bound or '')
  local brief = now - (tonumber(since or '') or 0) <= BRIEF
  if bound and not bound_allows(bound, length, promised[''], tasks, brief) then
    return false
  elseif lane_bound then
    local waiting = lane_waiting(base, lane)
    if not bound_allows(lane_bound, waiting, promised[lane] or 0, tasks, brief) then
      return false
    end
    promised[lane] = (promised[lane] or 0) + tasks
  end
  promised[''] = promised[''] + tasks
  return true
end

-- Counts the tasks of a producer that has_room has counted, and that does not listen any more, no longer.
local function take_promise_back(wish, promised)
  local tasks, lane_bound, lane = string.match(wish, '^%S+ (%d+) (%S+) %d+ (.*)$')
  tasks = tonumber(tasks or '') or 0
  promised[''] = promised[''] - tasks
  if tonumber(lane_bound or '') then
    promised[lane] = promised[lane] - tasks
  end
end

-- Wakes some of the producers that wait for room, as many as have room together. One that does not listen any more is removed,
-- and takes no room. An error (a key has a foreign type) ends it quietly, because the caller has written already.
local function wake_producers(base)
  local waiters = base .. ':waiters'
  local found = own(redis.pcall('HRANDFIELD', waiters, WOKEN_PRODUCERS, 'WITHVALUES')) or {}
  local known, length = pcall(function()
    return queued_length(base)
  end)
  local promised, now = {[''] = 0}, now_ms()
  for i = 1, known and #found or 0, 2 do
    local channel, number = string.match(found[i], '^(%w+)%-(%d+)$')
    local checked, fits = pcall(function()
      return has_room(base, found[i + 1], length, promised, now)
    end)
    if checked and fits then
      redis.call('HDEL', waiters, found[i])
      if redis.pcall('PUBLISH', base .. ':room:' .. (channel or ''), number or '') == 0 then
        take_promise_back(found[i + 1], promised)
      end
    end
  end
end

-- Wakes producers if some wait for room: the caller has taken tasks out of the queue.
local function give_room(base)
  if redis.call('EXISTS', base .. ':waiters') == 1 then
    wake_producers(base)
  end
end

-- Removes the entries of a producer that has found room, and wakes others if there is more.
local function leave_waiters(base, waiters)
  if waiters[1] and redis.call('EXISTS', base .. ':waiters') == 1 then
    for _, waiter in ipairs(waiters) do
      own(redis.pcall('HDEL', base .. ':waiters', (parsed_waiter(waiter))))
    end
    wake_producers(base)
  end
end

-- Stores a plain task whose payload looks like a reference as a job. Returns the item of the list.
local function stored_as_job(base, task)
  local token = next_token(base)
  store_token(base, token)
  local number, digest = digits(token), redis.sha1hex(task)
  local id = new_id(base, number)
  redis.call('DEL', base .. ':job:' .. id) -- another application's value, if there is one
  redis.call('HSET', base .. ':job:' .. id, 'task', task, 'twin', digest, 'queued', number, 'state', 'waiting', 'first', number,
    'last', number)
  own(redis.pcall('SADD', base .. ':twins:' .. digest, id)) -- the same: then the job cannot be found by its payload
  return MARKER .. id
end

local HANDOFF_BYTES = 16384 -- of a payload; a longer one would delay the cancellations on the channel of its worker

-- Claims a plain `task`, which is in no list yet, for a waiting worker that takes hand-offs, and sends it along with the wake-up.
-- Returns true if the worker received it. Only an empty queue hands a task over, in which nothing but its order decides who runs
-- it, and only a user that may claim. The message comes first: without a receiver nothing was claimed.
local function hand_off(base, task)
  if #task > HANDOFF_BYTES or job_id(task) or redis.call('LLEN', base) > 0 or redis.acl_check_cmd
    and not (redis.acl_check_cmd('SADD', base .. ':claims:1', '1') and redis.acl_check_cmd('LPUSH', base .. ':claim:1', task)) then
    return false
  end
  local others = permitted(redis.pcall('EXISTS', base .. ':paused', base .. ':limits', base .. ':suspects', base .. ':lanes',
    base .. ':waiters'))
  local worker = others == 0 and own(redis.pcall('SPOP', base .. ':hungry'))
  if not worker then
    return false
  end
  local claims, token, now, last = base .. ':claims:' .. worker, next_token(base)
  local claim = digits(token)
  local held = base .. ':claim:' .. claim
  local policy = permitted(redis.pcall('HMGET', base .. ':policy:' .. worker, 'secret', 'handoffs'))
  local admission = policy and policy[1] and policy[2] == '1' and permitted(redis.pcall('HGET', base .. ':workers', worker))
  if not admission or admission == LEAVING or not own(redis.pcall('SCARD', claims)) or redis.call('EXISTS', held) == 1 then
    redis.call('SADD', base .. ':hungry', worker) -- it can be woken
    return false
  end
  local proof = redis.sha1hex(policy[1] .. ' ' .. claim .. ' ' .. task)
  local receivers = redis.pcall('PUBLISH', base .. ':wake:' .. worker, 't ' .. claim .. ' ' .. proof .. ' ' .. task)
  if type(receivers) ~= 'number' or receivers == 0 then
    return false
  end
  redis.call('LPUSH', held, task)
  redis.call('SADD', claims, claim)
  store_token(base, token)
  renew_hourly(base, last, now)
  count(base, 'claimed', 1)
  return true
end

-- enqueue: puts tasks at the back (or the front) of a queue and wakes as many waiting workers as there are tasks. All of them are
-- stored or none. A payload that begins with the reference marker becomes a job with a generated id. One task for an empty queue is
-- claimed for a waiting worker at once, and goes to it together with its wake-up.
-- ARGV[4] bound tasks that may wait, including those due later; -1: no limit. A space and CHANNEL-NUMBER may follow: if the
--   queue is full, the producer waits for room under this name
-- ARGV[5] front 1: to be taken next, 0: to the back
-- ARGV[6..] tasks bytes, in the order in which they are to be taken
-- RETURNS ok stored | full waiting | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- ALWAYS whole_number digits producer_state is_plain forget_replies numbered job_id count
-- OFTEN hand_off permitted next_token store_token renew_hourly renew_counts
local function enqueue()
  local queue = KEYS[1]
  local bound, front = ARGV[4], ARGV[5] == '1'
  local tasks_from, tasks = 6, #ARGV - 5

  -- A key of a wrong type is an error before the first write.
  redis.call('LLEN', queue)
  local workers_wait = redis.call('SCARD', queue .. ':hungry') > 0
  local refused, waiter
  if bound ~= '-1' then
    refused, waiter = refuse_enqueue(queue, bound, tasks)
  end
  if refused then
    return refused
  end
  count(queue, 'enqueued', tasks) -- the first write: an error if the counters are of another type
  for chunk = 0, tasks - 1, 1000 do
    local items = {}
    for i = chunk, math.min(chunk + 1000, tasks) - 1 do
      local position = front and tasks - 1 - i or i
      local task = ARGV[tasks_from + position]
      items[#items + 1] = job_id(task) and stored_as_job(queue, task) or task
    end
    if workers_wait and tasks == 1 and hand_off(queue, items[1]) then
      return {'ok', tasks}
    end
    redis.call(front and 'RPUSH' or 'LPUSH', queue, unpack(items))
  end
  if workers_wait then
    wake(queue, tasks)
  end
  if waiter then
    leave_waiters(queue, {waiter})
  end
  return {'ok', tasks}
end

-- enqueue_traced: puts plain tasks at the back (or the front) of a queue, together with the context of a trace. Each becomes a job
-- with a generated id, and is found by its payload, as a plain task that was retried. All of them are stored or none. Wakes as
-- many waiting workers as there are tasks.
-- ARGV[4] bound tasks that may wait, including those due later; -1: no limit. A space and CHANNEL-NUMBER may follow: if the
--   queue is full, the producer waits for room under this name
-- ARGV[5] front 1: to be taken next, 0: to the back
-- ARGV[6] meta JSON, the `meta` of each of the jobs
-- ARGV[7..] tasks bytes, in the order in which they are to be taken
-- RETURNS ok stored | full waiting | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local function enqueue_traced()
  local queue = KEYS[1]
  local bound, front, meta = ARGV[4], ARGV[5] == '1', ARGV[6]
  local tasks_from, tasks = 7, #ARGV - 6

  check_types(queue)
  if not valid_option('meta', meta) then
    return redis.error_reply('ERR the meta of a task cannot be that')
  end
  local refused, waiter
  if bound ~= '-1' then
    refused, waiter = refuse_enqueue(queue, bound, tasks)
  end
  if refused then
    return refused
  end

  local token = next_token(queue)
  store_token(queue, token + tasks - 1)
  for i = 0, tasks - 1 do
    local position = front and tasks - 1 - i or i
    local task = ARGV[tasks_from + position]
    local number, digest = digits(token + i), redis.sha1hex(task)
    local id = new_id(queue, number)
    redis.call('DEL', queue .. ':job:' .. id) -- another application's value, if there is one
    redis.call('HSET', queue .. ':job:' .. id, 'task', task, 'twin', digest, 'queued', number,
      'state', 'waiting', 'first', number, 'last', number, 'meta', meta)
    add_twin(queue, digest, id)
    redis.call(front and 'RPUSH' or 'LPUSH', queue, MARKER .. id)
  end
  renew_counts(queue)
  count(queue, 'enqueued', tasks)
  wake(queue, tasks)
  if waiter then
    leave_waiters(queue, {waiter})
  end
  return {'ok', tasks}
end

-- list_tasks: returns waiting payloads, newest first, or from the front in the order in which they will be taken. Those of lanes
-- follow, lane by lane: first the lanes whose turn comes first, at the end those that may not start any.
-- ARGV[1] limit tasks
-- ARGV[2] from_front 1: the next to be taken first, 0: the newest first
-- ARGV[3] max_bytes bytes of payload after which no further task is listed
-- ARGV[4] max_skipped references without a record that are skipped at most
-- RETURNS ok waiting task...
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_tasks()
  local queue = KEYS[1]
  local limit, from_front = tonumber(ARGV[1]), ARGV[2] == '1'
  local max_bytes, max_skipped = tonumber(ARGV[3]), tonumber(ARGV[4])
  local suspects, lanes = queue .. ':suspects', queue .. ':lanes'

  local reply = {'ok', waiting_length(queue)}
  local bytes, skipped, listed = 0, 0, {}

  -- Lists one item; returns false if the reply is full.
  local function list(item)
    if #reply - 2 >= limit or bytes >= max_bytes or skipped >= max_skipped then
      return false
    end
    local id = job_id(item)
    local task = item
    if id then
      local kept = own(redis.pcall('HMGET', queue .. ':job:' .. id, 'task', 'state')) or {}
      task = kept[2] == 'waiting' and not listed[id] and kept[1] -- a job that was due in between has two positions in the lists
    end
    if task then
      reply[#reply + 1] = task
      bytes, listed[id or ''] = bytes + #task, id
    else
      skipped = skipped + 1
    end
    return true
  end

  if limit > 0 then
    local epoch = own(redis.pcall('HGET', lanes, 'epoch')) or false
    local function list_all(key)
      tolerant(function() read_items(key, 0, from_front, max_bytes, list) end)
    end
    list_all(from_front and suspects or queue)
    list_all(from_front and queue or suspects)
    for _, key in ipairs({queue .. ':lanes:ring', queue .. ':lanes:held'}) do
      for _, lane in ipairs(own(redis.pcall('ZRANGE', key, 0, limit - 1)) or {}) do
        list_all(lane_list(queue, lane, epoch))
      end
    end
  end
  return reply
end

-- find_task: the plain tasks with a payload that wait or run, and the jobs that were such tasks.
-- ARGV[1] task bytes
-- ARGV[2] most tasks of each of the three kinds
-- ARGV[3] depth tasks at each end of the queue that are compared
-- ARGV[4] budget claims that are compared
-- RETURNS ok complete places ids claims: complete is 1 if no task with this payload is left out; a place is the number of tasks
--   that are taken before; claims are claim and worker in turn
-- RESEND safe: it only reads
-- FLAGS no-writes
local function find_task()
  local queue = KEYS[1]
  local task, most, depth, budget = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

  local length, places, claims = redis.call('LLEN', queue), {}, {}
  local complete = length <= 2 * depth
  if not job_id(task) then
    local first = redis.call('LPOS', queue, task, 'RANK', -1, 'COUNT', most, 'MAXLEN', depth)
    local rest = length - depth
    local last = rest > 0 and redis.call('LPOS', queue, task, 'COUNT', most, 'MAXLEN', math.min(rest, depth)) or {}
    for _, found in ipairs({first, last}) do
      complete = complete and #found < most
      for _, index in ipairs(found) do
        places[#places + 1] = length - 1 - index
      end
    end
    local holders = tolerant(function() return claim_holders(queue) end) or {}
    local after = each_claim(queue, holders, '-', budget, function(claim, worker)
      if #claims < 2 * most and own(redis.pcall('LPOS', queue .. ':claim:' .. claim, task)) then
        claims[#claims + 1], claims[#claims + 2] = claim, worker
      end
    end)
    complete = complete and after == '-' and #claims < 2 * most
  end
  local twins = own(redis.pcall('SSCAN', queue .. ':twins:' .. redis.sha1hex(task), '0', 'COUNT', most)) or {'0', {}}
  return {'ok', complete and twins[1] == '0' and 1 or 0, places, twins[2], claims}
end

-- inspect: a snapshot of one queue, for people and for the leader's scan.
-- RETURNS ok waiting due running failed broken paused trash workers counts blocked next_in oldest declared override room
--   opens_in lanes held rules only_held batches relay open soon suspended kept kept_bytes: paused is false or the reason, trash not 0 if there is
--   something to purge, workers the admitted ones, also leaving ones, counts names and values in turn, next_in ms until a job
--   is due or a waiting task may start (-1: not known), oldest ms since the job in front was due (-1: no job in front),
--   declared and override are false or limits as text, room how many tasks may start now (-1: no limit), opens_in ms until
--   time makes room (-1: it does not), lanes how many lanes have tasks, held how many of them may not start one, rules how
--   many fields say how lanes start, only_held 1 if tasks wait only in lanes that are held, batches how many have their home
--   here, relay 1 if there are messages for other queues, or batches to look at, open how many of the first MOST_READ batches
--   have not ended, soon how many jobs are due within SOON ms, suspended how many jobs are, kept how many have ended and are kept,
--   kept_bytes what these take
-- RESEND safe: it only reads
-- FLAGS no-writes
local function inspect()
  local queue = KEYS[1]
  local workers, due, failed, broken = queue .. ':workers', queue .. ':due', queue .. ':failed', queue .. ':broken'
  local paused, counts, trash = queue .. ':paused', queue .. ':counts', queue .. ':trash'
  local trash_suspects, trash_due = queue .. ':trash:suspects', queue .. ':trash:due'
  local trash_blocked, blocked, limits = queue .. ':trash:blocked', queue .. ':blocked', queue .. ':limits'
  local suspended, trash_suspended = queue .. ':suspended', queue .. ':trash:suspended'

  local SOON = 10000 -- ms
  local PAUSED_BY_OTHER = 'the key of the pause has a foreign type'
  local MOST_READ = 500 -- batches, in the order in which the leader looks at them: ended ones are mostly behind the others

  local running, serving = count_running(queue, workers)
  local now, waiting = now_ms(), waiting_length(queue)
  local in_front = job_id(redis.call('LINDEX', queue, -1) or '')
  local run_at = in_front and whole_number(own(redis.pcall('HGET', queue .. ':job:' .. in_front, 'run_at')))
  local trashed = redis.call('EXISTS', trash, trash_suspects, trash_due, trash_suspended, trash_blocked, queue .. ':trash:lanes')
  local room, opens_in = tolerant(function() return room_of(queue, now) end)
  local held = own(redis.pcall('ZCARD', queue .. ':lanes:held')) or 0
  local next_in = tolerant(function() return next_start_in(queue, due, waiting, now) end)
  room = room or math.huge
  local only_held = room > 0 and held > 0 and tolerant(function() return startable_items(queue) end) == 0
  if only_held then
    local opens = tolerant(function() return first_time(queue .. ':lanes:opens') end)
    room, opens_in = 0, opens and math.max(0, opens - now)
  end
  local homes, open = own(redis.pcall('ZCARD', queue .. ':batches')) or 0, 0
  for _, id in ipairs(homes > 0 and redis.call('ZRANGE', queue .. ':batches', 0, MOST_READ - 1) or {}) do
    local state = own(redis.pcall('HGET', queue .. ':batch:' .. id, 'state'))
    open = open + ((state == 'open' or state == 'sealed') and 1 or 0)
  end
  local all_due, kept = own(redis.pcall('ZCARD', due)) or 0, own(redis.pcall('ZCARD', queue .. ':done')) or 0
  local fired = own(redis.pcall('ZCARD', queue .. ':done_fired')) or 0
  local soon = all_due > 0 and redis.call('ZCOUNT', due, '-inf', now + SOON) or 0
  local kept_bytes = kept > 0 and whole_number(own(redis.pcall('HGET', queue .. ':done_total', 'bytes')), 0) or 0
  local set = own(redis.pcall('HMGET', limits, 'declared', 'override')) or {}
  local why = own(redis.pcall('GET', paused))
  if why == nil then
    why = PAUSED_BY_OTHER
  end
  return {'ok', waiting, all_due, running, own(redis.pcall('ZCARD', failed)) or 0, own(redis.pcall('ZCARD', broken)) or 0, why, trashed, serving, own(redis.pcall('HGETALL', counts)) or {},
    own(redis.pcall('SCARD', blocked)) or 0, next_in or -1, run_at and math.max(0, now - run_at) or -1,
    set[1] or false, set[2] or false,
    room == math.huge and -1 or room, opens_in or -1, own(redis.pcall('ZCARD', queue .. ':lanes:names')) or 0, held,
    own(redis.pcall('HLEN', queue .. ':lanes:rules')) or 0, only_held and 1 or 0,
    homes, tolerant(function() return needs_relay(queue, now) end) or 0, open, soon, own(redis.pcall('ZCARD', suspended)) or 0,
    kept + fired, kept_bytes + fired_bytes(queue, fired)}
end

-- pause: stops claims of the queue's tasks; enqueueing goes on.
-- ARGV[4] reason text
-- ARGV[5] duration ms after which the pause ends, - if it does not
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo a resume
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function pause()
  local queue = KEYS[1]
  local reason, duration = ARGV[4], tonumber(ARGV[5])
  local paused = queue .. ':paused'

  check_types(queue)
  if duration then
    redis.call('SET', paused, reason, 'PX', digits(duration))
    announce_room(queue, duration, now_ms())
  else
    redis.call('SET', paused, reason)
  end
  count(queue, 'paused', 1)
  return {'ok'}
end

-- resume: allows claims of the queue's tasks again and notifies every worker that serves it.
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo a pause
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function resume()
  local queue = KEYS[1]
  local paused = queue .. ':paused'

  check_types(queue)
  redis.call('DEL', paused)
  count(queue, 'resumed', 1)
  redis.pcall('PUBLISH', queue, 'resumed')
  return {'ok'}
end

-- cancel_all: cancels every task of a queue: waiting tasks go to the trash, running ones are marked and their workers notified.
-- A task that ran before and is given back is dropped even if it is not marked yet: none escapes, in one call or several.
-- ARGV[4] after place among the claims up to which they were looked at, - at first
-- ARGV[5] budget claims to look at in one call
-- ARGV[6] reason text for callers that wait for a result
-- RETURNS ok waiting running after claim... | more (the same; call again with after) | busy (purge_queue first) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function cancel_all()
  local queue = KEYS[1]
  local after, budget, reason = ARGV[4], tonumber(ARGV[5]), ARGV[6]

  check_types(queue)
  local holders = claim_holders(queue)
  local waiting = 0
  if after == '-' then
    waiting = clear(queue, reason)
    if not waiting then
      return {'busy'}
    end
  end
  local reply, marked = {'ok', waiting, 0, '-'}, {}
  local cleared = cleared_up_to(queue)
  after = each_claim(queue, holders, after, budget, function(claim, worker)
    if tonumber(claim) > cleared then
      return -- it began between two calls
    end
    local id = job_id(own(redis.pcall('LINDEX', queue .. ':claim:' .. claim, 0)) or '')
    if id then
      store_cancel_reason(queue, id, reason)
    end
    marked[#marked + 1], marked[#marked + 2], reply[#reply + 1] = claim, worker, claim
  end)
  request_cancels(queue, marked)
  count(queue, 'cancelled', waiting)
  give_room(queue)
  reply[1], reply[3], reply[4] = after == '-' and 'ok' or 'more', #reply - 4, after
  return reply
end

-- delete_queue: moves everything that waits to the trash; claims and workers stay. Running tasks may finish; a task that
-- is given back later is dropped, because its claim is not above the token stored here.
-- RETURNS ok waiting | busy (purge_queue first) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function delete_queue()
  local queue = KEYS[1]

  local waiting = clear(queue, 'the queue was deleted')
  if not waiting then
    return {'busy'}
  end
  count(queue, 'deleted', waiting)
  redis.pcall('PUBLISH', queue, 'deleted')
  give_room(queue)
  return {'ok', waiting}
end

-- purge_queue: deletes one batch of the trash, with the records of its jobs. Callers that wait for one of them are notified of
-- the cancellation.
-- ARGV[1] limit plain tasks; a job counts as ten of them, because its record is deleted as well
-- RETURNS ok | more
-- RESEND safe: a copy purges the next step
-- GROUP seldom
-- FLAGS allow-oom
local function purge_queue()
  local queue = KEYS[1]
  local limit = tonumber(ARGV[1])
  local trash, trash_suspects, trash_due = queue .. ':trash', queue .. ':trash:suspects', queue .. ':trash:due'
  local trash_blocked, counts, trash_lanes = queue .. ':trash:blocked', queue .. ':counts', queue .. ':trash:lanes'
  local trash_suspended = queue .. ':trash:suspended'

  local JOB = 10 -- the time that a job takes, in plain tasks

  redis.call('LLEN', trash_suspects)
  redis.call('ZCARD', trash_due)
  redis.call('ZCARD', trash_suspended)
  redis.call('SCARD', trash_blocked)
  redis.call('ZCARD', trash_lanes)
  check_lane_types(queue)
  local noted, ttl = redis.call('HMGET', counts, 'cleared', 'cleared_why'), longest_result_ttl(queue)
  local cleared, why = whole_number(noted[1], math.huge, NEVER), noted[2] or ''
  local function purge(id)
    local kept = own(redis.pcall('HMGET', queue .. ':job:' .. id, 'task', 'queued')) or {}
    if kept[1] and whole_number(kept[2], 0, NEVER) <= cleared then -- else a newer job of this id waits in the queue
      delete_trashed_job(queue, id, ttl, why)
    end
    limit = limit - JOB
  end

  local function purge_list(list)
    while limit > 0 and redis.call('EXISTS', list) == 1 do
      local id = job_id(redis.call('RPOP', list))
      if id then
        purge(id)
      else
        limit = limit - 1
      end
    end
  end

  purge_list(trash)
  purge_list(trash_suspects)
  while limit > 0 and redis.call('EXISTS', trash_lanes) == 1 do
    local lane, list = trashed_lane(queue, trash_lanes)
    limit = limit - 1
    if lane_length(list) == 0 then
      redis.call('ZREM', trash_lanes, lane)
    end
    purge_list(list)
  end
  drop_idle_lanes(queue)
  for _, set in ipairs({trash_due, trash_suspended}) do
    local popped = limit > 0 and redis.call('ZPOPMIN', set, math.ceil(limit / JOB)) or {}
    for i = 1, #popped, 2 do
      purge(popped[i])
    end
  end
  if limit > 0 then
    for _, id in ipairs(redis.call('SPOP', trash_blocked, math.ceil(limit / JOB))) do
      purge(id)
    end
  end
  wake(queue, count_members(queue))
  local left = redis.call('EXISTS', trash, trash_suspects, trash_due, trash_suspended, trash_blocked, trash_lanes)
  return {left > 0 and 'more' or 'ok'}
end
