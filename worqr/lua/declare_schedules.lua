#!lua flags=allow-oom
-- declare_schedules: notes schedules of a peer and that they were seen just now. A new or changed one counts its firings from
-- now on; one that is as it was goes on where it stood, so that what was missed while no peer lived can be made up for.
-- KEYS[1] producer HASH
-- KEYS[2] schedules HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] replace 1: change what another peer declared, 0: only say that they are still meant
-- ARGV[4] expire_s s until all schedules of a mesh without peers are forgotten
-- ARGV[5..] names and definitions in turn
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not replace what a newer peer declared
-- NUMBERED
-- USES counts fence
local schedules = KEYS[2]
local replace, expire_s = ARGV[3] == '1', ARGV[4]

redis.call('HLEN', schedules)
local now = digits(now_ms())
for i = 5, #ARGV, 2 do
  local name, value = ARGV[i], ARGV[i + 1]
  local found = redis.call('HGET', schedules, 'def ' .. name)
  if not found or replace and found ~= value then
    redis.call('HSET', schedules, 'def ' .. name, value, 'last ' .. name, now)
    redis.call('HDEL', schedules, 'next ' .. name, 'owed ' .. name)
  end
  redis.call('HSET', schedules, 'seen ' .. name, now)
end
redis.call('EXPIRE', schedules, expire_s)
return {'ok'}
