#!lua flags=allow-oom
-- pause_schedule: pauses a schedule, or resumes it from now on; firings missed while it was paused are not caught up.
-- KEYS[1] producer HASH
-- KEYS[2] schedules HASH
-- KEYS[3] schedules_due ZSET
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] name of the schedule
-- ARGV[4] paused 1 or 0
-- RETURNS ok | unknown | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo what came after it
-- NUMBERED
local schedules, schedules_due = KEYS[2], KEYS[3]
local name, paused = ARGV[3], ARGV[4]

redis.call('ZCARD', schedules_due)
if redis.call('HEXISTS', schedules, 'def ' .. name) == 0 then
  return {'unknown'}
end
if paused == '1' then
  redis.call('HSET', schedules, 'paused ' .. name, '1')
  redis.call('ZREM', schedules_due, name)
elseif redis.call('HDEL', schedules, 'paused ' .. name) == 1 then
  local now = now_ms()
  redis.call('HSET', schedules, 'last ' .. name, digits(now))
  redis.call('HDEL', schedules, 'next ' .. name, 'owed ' .. name)
  schedule_check(schedules_due, name, digits(now))
  store_clock(schedules, now)
end
return {'ok'}
