#!lua
-- sample_queue: stores a record of the queue in both rings of its history. It reads what it stores at this moment. So it does
-- not matter which leader sends it, or whether two leaders do.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] due ZSET
-- KEYS[4] failed ZSET
-- KEYS[5] counts HASH
-- KEYS[6] runs HASH
-- KEYS[7] history STRING
-- KEYS[8] history10 STRING
-- ARGV[1] expire_s s
-- ARGV[2] create 1: make the rings if there are none; 0: only the leader that gave the queue its rings makes them
-- ARGV[3] since minute in or after which the totals changed, with 2^31 if they were zero before; 0: unknown
-- ARGV[4] age ms for which the oldest task has waited, as the leader estimates it, -1: unknown
-- RETURNS ok record | missing (there are no rings)
-- RESEND safe: a copy stores the record of its own time
local queue, workers, due, failed, counts, runs = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local history, history10 = KEYS[7], KEYS[8]
local expire_s, create, since, age = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

if redis.call('STRLEN', history) + redis.call('STRLEN', history10) == 0 and create == '0' then
  return {'missing'}
end
local now = now_ms()
local record = history_record(queue, workers, due, failed, counts, runs, now, since, age)
store_record(history, 1, now, record, expire_s)
store_record(history10, 10, now, record, expire_s)
return {'ok', record}
