#!lua flags=no-writes
-- read_history: the last records of a queue's history, with a record of this moment.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] due ZSET
-- KEYS[4] failed ZSET
-- KEYS[5] counts HASH
-- KEYS[6] runs HASH
-- KEYS[7] history STRING
-- ARGV[1] step minutes of a record of this history: 1 or 10
-- ARGV[2] number of records, at most as many as it has
-- RETURNS ok record before records...: record is one of this moment, before the newest one from before those asked for, false
--   if there is none, records are those asked for, in one or two texts. A slot that was not written holds an older record, or
--   zeros
-- RESEND safe: it only reads
local queue, workers, due, failed, counts, runs = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local history = KEYS[7]
local step, number = tonumber(ARGV[1]), tonumber(ARGV[2])

local now, length = now_ms(), HISTORY_LENGTHS[step]
number = math.max(1, math.min(number, length))
local record = history_record(queue, workers, due, failed, counts, runs, now, 0, -1)
local last = math.floor(now / 60000 / step)
local first = last - number + 1
local from, to = first % length * HISTORY_BYTES, (last % length + 1) * HISTORY_BYTES - 1
local reply = {'ok', record, record_before(history, step, first, number)}
if from < to then
  reply[4] = redis.call('GETRANGE', history, from, to)
else -- in two parts, because the end of the ring lies between them
  reply[4], reply[5] = redis.call('GETRANGE', history, from, -1), redis.call('GETRANGE', history, 0, to)
end
return reply
