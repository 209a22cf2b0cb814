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
-- USES counts fence producer
local producer, schedules = KEYS[1], KEYS[2]
local number, lowest, name, paused = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local before = replied(producer, number, lowest)
if before then
  return before
end
if redis.call('HEXISTS', schedules, 'def ' .. name) == 0 then
  return {'unknown'}
end
if paused == '1' then
  redis.call('HSET', schedules, 'paused ' .. name, '1')
elseif redis.call('HDEL', schedules, 'paused ' .. name) == 1 then
  redis.call('HSET', schedules, 'last ' .. name, digits(now_ms()))
  redis.call('HDEL', schedules, 'next ' .. name, 'owed ' .. name)
end
return remember(producer, number, lowest, {'ok'})
