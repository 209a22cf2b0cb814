-- The history of a queue: records of a fixed size, in rings with one record for a minute and one for ten minutes. The Python
-- module worqr.history_records documents the layout of a record, and computes rates from records.

local HISTORY_BYTES = 232 -- of a record
local HISTORY_LENGTHS = {[1] = 480, [10] = 432} -- minutes of a record, and records in its ring: 8 hours and 3 days
local NO_AGE = 4294967295
local NO_SINCE = '\0\0\0\0' -- of a record: it is not known since when its totals have changed
local FIRST_RECORD = '\0\0\0\1' -- the same of the first record of a ring

-- Returns the fields of a hash as numbers modulo 2^32. Missing fields are 0.
local function read_totals(key, fields)
  local totals = own(redis.pcall('HMGET', key, unpack(fields))) or {}
  for i = 1, #fields do
    totals[i] = whole_number(totals[i], 0, NEVER) % 4294967296
  end
  return totals
end

-- Returns how many tasks of the queue are claimed, and the workers that serve it.
local function count_running(queue, workers)
  local serving, running = (own(redis.pcall('HKEYS', workers)) or {}), 0
  for _, worker in ipairs(serving) do
    running = running + (own(redis.pcall('SCARD', queue .. ':claims:' .. worker)) or 0)
  end
  return running, serving
end

-- Returns the buckets of run times and of waiting times, and the sums of both, as totals modulo 2^32.
local function run_totals(runs)
  local fields = {'rs', 'ws'}
  for i = 0, 19 do
    fields[#fields + 1] = 'r' .. i
  end
  for i = 0, 15 do
    fields[#fields + 1] = 'w' .. i
  end
  return read_totals(runs, fields)
end

-- Returns a record of the queue at `now`. `age`: ms for which the oldest task has waited, if it is a plain task, or -1.
local function history_record(queue, workers, due, failed, counts, runs, now, since, age)
  local in_front = job_id(redis.call('LINDEX', queue, -1) or '')
  local run_at = in_front and whole_number(own(redis.pcall('HGET', queue .. ':job:' .. in_front, 'run_at')))
  if run_at then
    age = math.max(0, now - run_at)
  end
  local waiting, running, serving = waiting_length(queue), count_running(queue, workers)
  local totals = read_totals(counts, {'enqueued', 'claimed', 'finished', 'failed', 'retried', 'cancelled', 'stalled',
    'stopped', 'broken', 'timed_out', 'expired', 'deleted'})
  for _, total in ipairs(run_totals(runs)) do
    totals[#totals + 1] = total
  end
  local format = '>I4I4I2I2I4I4I4I4I4' .. string.rep('I4', #totals)
  return struct.pack(format, math.floor(now / 60000), since, now % 60000, math.min(#serving, 65535),
    age < 0 and NO_AGE or math.min(age, NO_AGE - 1), waiting, (own(redis.pcall('ZCARD', due)) or 0), running,
    (own(redis.pcall('ZCARD', failed)) or 0), unpack(totals))
end

-- Stores the record in the ring of `step` minutes. It replaces an earlier record of the same time, but for the minute since
-- which the totals have changed: both records follow the same one. The first record of a ring is not replaced if nothing is known
-- of the time before it, because all later differences begin there. A new ring gets its full size at once, because a string
-- that grows takes up to twice its size.
local function store_record(ring, step, now, record, expire_s)
  local slot = math.floor(now / 60000 / step)
  local at = slot % HISTORY_LENGTHS[step] * HISTORY_BYTES
  local kept, since = redis.call('GETRANGE', ring, at, at + 7), string.sub(record, 5, 8)
  if #kept == 8 and math.floor(struct.unpack('>I4', kept) / step) == slot then
    since = string.sub(kept, 5)
  elseif kept == '' then
    redis.call('SETRANGE', ring, HISTORY_LENGTHS[step] * HISTORY_BYTES - 1, '\0')
    since = since == NO_SINCE and FIRST_RECORD or since
  end
  if kept == '' or since ~= FIRST_RECORD then
    redis.call('SETRANGE', ring, at, string.sub(record, 1, 4) .. since .. string.sub(record, 9))
  end
  if redis.call('PTTL', ring) < expire_s * 875 then -- ms: an eighth has passed
    redis.call('EXPIRE', ring, expire_s)
  end
end

-- Returns the newest record from before the slot `first`, or false. For a busy queue it is in the first slot that is read.
local function record_before(ring, step, first, number)
  local length, newest, found = HISTORY_LENGTHS[step], -1, nil
  for slot = first - 1, first - length + number, -1 do
    local at = slot % length * HISTORY_BYTES
    local minute = redis.call('GETRANGE', ring, at, at + 3)
    local there = #minute == 4 and minute ~= NO_SINCE and math.floor(struct.unpack('>I4', minute) / step) or -1
    if there > newest and there <= slot then
      newest, found = there, at
      if there == slot then
        break
      end
    end
  end
  return found and redis.call('GETRANGE', ring, found, found + HISTORY_BYTES - 1) or false
end
