-- A queue as a whole: the types of its keys, its counters and events, the wake-ups of its workers, and its clearing.
-- In all modules `base` is the key of the queue's list. The queue's other keys and channels begin with it.

-- Reads the keys of a queue that its scripts write. So a key of a wrong type, written by another application, is an error
-- before the first write.
local function check_types(base)
  redis.call('LLEN', base)
  redis.call('LLEN', base .. ':suspects')
  redis.call('SCARD', base .. ':hungry')
  redis.call('SCARD', base .. ':cancelling')
  redis.call('HLEN', base .. ':workers')
  redis.call('HLEN', base .. ':counts')
  redis.call('ZCARD', base .. ':due')
  redis.call('SCARD', base .. ':blocked')
  redis.call('HLEN', base .. ':aside')
  redis.call('ZCARD', base .. ':failed')
  redis.call('ZCARD', base .. ':broken')
  redis.call('ZCARD', base .. ':result_ttls')
  redis.call('HLEN', base .. ':limits')
  redis.call('SCARD', base .. ':limited')
  if redis.call('EXISTS', base .. ':lanes', base .. ':lanes:rules') > 0 then
    check_lane_types(base)
  end
end

-- Like check_types, for the keys of lanes.
-- LATER: most queues have no lanes.
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

-- Returns how the first 100 of the runs `ends` ended, as text: a line with the lengths of all values, -1 for none, and the values
-- without anything between them, at most 1 KiB of each. An end is the worker, the id of a job (false: a plain task), the payload, its
-- result (the words kind and value, each in front of what it is), the type and the message of its error.
-- LATER: few programs listen.
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

local TRASHED_KEYS = {'', ':suspects', ':due', ':blocked'}

-- Moves the lanes to the trash: their names, by which a purge finds their lists. A new epoch of lists begins.
-- LATER: most queues have no lanes.
local function clear_lanes(base)
  local lanes = base .. ':lanes'
  if redis.call('EXISTS', base .. ':lanes:names') == 1 then
    redis.call('RENAME', base .. ':lanes:names', base .. ':trash:lanes')
    redis.call('DEL', base .. ':lanes:ring', base .. ':lanes:held')
    redis.call('HDEL', lanes, 'waiting', 'weights')
    add_to(lanes, 'epoch', 1)
  end
end

-- Moves everything that waits to the trash in O(1), to be purged in steps, and stores a fencing token. A task that was
-- claimed up to that token and is released later is dropped. Callers that wait for its result receive `why`. Returns how
-- many tasks waited, or nil while an earlier clearing is still to be purged.
local function clear(base, why)
  local trash = base .. ':trash'
  if redis.call('EXISTS', trash, trash .. ':suspects', trash .. ':due', trash .. ':blocked', trash .. ':lanes') > 0 then
    return nil
  end
  redis.call('HLEN', base .. ':counts') -- a key of another type is an error before anything is moved
  redis.call('HLEN', base .. ':lanes')
  local waiting = queued_length(base)
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
