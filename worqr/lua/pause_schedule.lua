#!lua flags=allow-oom
-- pause_schedule: lets the firings of a schedule pass, or fires again from now on: nothing is made up for.
-- KEYS[1] producer HASH
-- KEYS[2] schedules HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] name of the schedule
-- ARGV[4] paused 1 or 0
-- RETURNS ok | unknown | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo what came after it
-- NUMBERED
-- USES counts fence
local schedules = KEYS[2]
local name, paused = ARGV[3], ARGV[4]

if redis.call('HEXISTS', schedules, 'def ' .. name) == 0 then
  return {'unknown'}
end
if paused == '1' then
  redis.call('HSET', schedules, 'paused ' .. name, '1')
elseif redis.call('HDEL', schedules, 'paused ' .. name) == 1 then
  redis.call('HSET', schedules, 'last ' .. name, digits(now_ms()))
  redis.call('HDEL', schedules, 'next ' .. name, 'owed ' .. name)
end
return {'ok'}
