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

-- sample_queue: stores a record of the queue in both rings of its history. It reads what it stores at this moment. So it does
-- not matter which leader sends it, or whether two leaders do.
-- ARGV[1] expire_s s
-- ARGV[2] create 1: make the rings if there are none; 0: only the leader that gave the queue its rings makes them
-- ARGV[3] since minute in or after which the totals changed, with 2^31 if they were zero before; 0: unknown
-- ARGV[4] age ms for which the oldest task has waited, as the leader estimates it, -1: unknown
-- RETURNS ok record | missing (there are no rings)
-- RESEND safe: a copy stores the record of its own time
local function sample_queue()
  local queue = KEYS[1]
  local expire_s, create, since, age = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
  local workers, due, failed, counts = queue .. ':workers', queue .. ':due', queue .. ':failed', queue .. ':counts'
  local runs, history, history10 = queue .. ':runs', queue .. ':history', queue .. ':history10'

  if redis.call('STRLEN', history) + redis.call('STRLEN', history10) == 0 and create == '0' then
    return {'missing'}
  end
  local now = now_ms()
  local record = history_record(queue, workers, due, failed, counts, runs, now, since, age)
  store_record(history, 1, now, record, expire_s)
  store_record(history10, 10, now, record, expire_s)
  return {'ok', record}
end

-- read_history: the last records of a queue's history, with a record of this moment.
-- ARGV[1] step minutes of a record of this history: 1 or 10
-- ARGV[2] number of records, at most as many as it has
-- RETURNS ok record before records...: record is one of this moment, before the newest one from before those asked for, false
--   if there is none, records are those asked for, in one or two texts. A slot that was not written holds an older record, or
--   zeros
-- RESEND safe: it only reads
-- FLAGS no-writes
local function read_history()
  local queue = KEYS[1]
  local step, number = tonumber(ARGV[1]), tonumber(ARGV[2])
  local workers, due, failed, counts = queue .. ':workers', queue .. ':due', queue .. ':failed', queue .. ':counts'
  local runs, history = queue .. ':runs', queue .. (step == 1 and ':history' or ':history10')

  local now, length = now_ms(), HISTORY_LENGTHS[step]
  number = math.max(1, math.min(number, length))
  local record = history_record(queue, workers, due, failed, counts, runs, now, 0, -1)
  local last = math.floor(now / 60000 / step)
  local first = last - number + 1
  local from, to = first % length * HISTORY_BYTES, (last % length + 1) * HISTORY_BYTES - 1
  local reply = {'ok', record, tolerant(function() return record_before(history, step, first, number) end) or false}
  if from < to then
    reply[4] = own(redis.pcall('GETRANGE', history, from, to)) or ''
  else -- in two parts, because the end of the ring lies between them
    reply[4] = own(redis.pcall('GETRANGE', history, from, -1)) or ''
    reply[5] = own(redis.pcall('GETRANGE', history, 0, to)) or ''
  end
  return reply
end

-- drop_history: deletes the history of a queue, because other queues are busier.
-- RETURNS ok
-- RESEND safe: it deletes what it deleted
-- FLAGS allow-oom
local function drop_history()
  local queue = KEYS[1]
  local history, history10 = queue .. ':history', queue .. ':history10'

  redis.call('DEL', history, history10)
  return {'ok'}
end

-- note_histories: notes which queues have a history, by the minute in which it was written last.
-- ARGV[1] expire_s s
-- ARGV[2] dropped name of a queue whose history was deleted, '' for none
-- ARGV[3..] names of queues, at most 1,000
-- RETURNS ok name minute...: all queues that have a history
-- RESEND safe: a copy notes the same names again, with a later time
local function note_histories()
  local mesh = KEYS[1]
  local expire_s, dropped = ARGV[1], ARGV[2]
  local histories = mesh .. ':histories'

  redis.call('ZREM', histories, dropped)
  local minute = math.floor(now_ms() / 60000)
  for i = 3, #ARGV do
    local name = ARGV[i]
    redis.call('ZADD', histories, minute, name)
  end
  redis.call('EXPIRE', histories, expire_s)
  local reply = redis.call('ZRANGE', histories, 0, 999, 'WITHSCORES')
  table.insert(reply, 1, 'ok')
  return reply
end

-- note_runs: adds a worker's counts of runs to the totals of the queue, and stores the runs that ended last, if the worker keeps
-- them.
-- ARGV[1] worker id
-- ARGV[2] number of the worker's request on this queue, grows
-- ARGV[3] keep how many ended runs the queue keeps
-- ARGV[4] ended runs that have ended, the last one at the end: JSON, a line for each; or ''
-- ARGV[5..] fields field and how much to add to it, in turn
-- RETURNS ok | gone: the worker has left the queue, or was removed from it
-- RESEND safe: fenced by the number; an equal or lower one adds nothing
local function note_runs()
  local queue = KEYS[1]
  local worker, number, keep, ended = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
  local policy, runs, recent = queue .. ':policy:' .. worker, queue .. ':runs', queue .. ':recent'

  local RECENT_EXPIRE = 86400 -- s after the last run: one day

  local last = redis.call('HMGET', policy, 'max_stalls', 'noted')
  if not last[1] then
    return {'gone'}
  end
  if number <= whole_number(last[2], -1) then
    return {'ok'}
  end
  redis.call('HLEN', runs)
  redis.call('HSET', policy, 'noted', digits(number))
  for i = 5, #ARGV, 2 do
    local field, n = ARGV[i], ARGV[i + 1]
    add_to(runs, field, n)
  end
  if redis.call('PTTL', runs) < COUNTS_EXPIRE * 500 then
    redis.call('EXPIRE', runs, COUNTS_EXPIRE)
  end
  if ended ~= '' then
    local lines = {}
    for line in string.gmatch(ended, '[^\n]+') do
      lines[#lines + 1] = line
    end
    local kept = own(redis.pcall('LPUSH', recent, unpack(lines)))
    if kept then
      if kept > keep then
        redis.call('RPOP', recent, kept - keep)
      end
      redis.call('EXPIRE', recent, RECENT_EXPIRE)
    end
  end
  return {'ok'}
end

-- read_runs: the totals of the runs of a queue. A value of another application in their place counts as none.
-- RETURNS ok totals: field and value in turn
-- RESEND safe: it only reads
-- FLAGS no-writes
local function read_runs()
  local queue = KEYS[1]
  local runs = queue .. ':runs'

  return {'ok', own(redis.pcall('HGETALL', runs)) or {}}
end

-- list_ended: the runs of a queue that ended last, the last one first, if its workers keep them.
-- ARGV[1] limit runs
-- RETURNS ok run...: each is JSON
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_ended()
  local queue = KEYS[1]
  local limit = tonumber(ARGV[1])
  local recent = queue .. ':recent'

  local reply = {'ok'}
  for _, run in ipairs(own(redis.pcall('LRANGE', recent, 0, limit - 1)) or {}) do
    reply[#reply + 1] = run
  end
  return reply
end
