#!lua flags=allow-oom
-- renew_schedules: notes that a worker still declares these schedules, and returns the names of those that are missing.
-- KEYS[1] schedules HASH
-- KEYS[2] schedules_due ZSET
-- KEYS[3] schedules_seen ZSET
-- ARGV[1] expire_s s until all schedules of a mesh without peers are forgotten
-- ARGV[2..] names text
-- RETURNS ok name... (missing)
-- RESEND safe: a copy notes the same again; missing schedules stay missing
local schedules, schedules_due, schedules_seen = KEYS[1], KEYS[2], KEYS[3]
local expire_s = ARGV[1]

redis.call('ZCARD', schedules_due)
redis.call('ZCARD', schedules_seen)
local led, missing = digits(whole_number(redis.call('HGET', schedules, 'led'), 0)), {'ok'}
for i = 2, #ARGV do
  local name = ARGV[i]
  if redis.call('HEXISTS', schedules, 'def ' .. name) == 0 then
    missing[#missing + 1] = name
  else
    redis.call('ZADD', schedules_seen, led, name)
    if not redis.call('ZSCORE', schedules_due, name) and redis.call('HEXISTS', schedules, 'paused ' .. name) == 0 then
      schedule_check(schedules_due, name, digits(now_ms()))
    end
  end
end
for _, key in ipairs({schedules, schedules_due, schedules_seen}) do
  redis.call('EXPIRE', key, expire_s)
end
return missing
