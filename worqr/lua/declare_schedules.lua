#!lua flags=allow-oom
-- declare_schedules: stores schedules of a worker. A new or changed one counts its firings from now on. An unchanged one
-- continues where it was, so that firings missed while no worker ran can be caught up. A pause stays.
-- KEYS[1] producer HASH
-- KEYS[2] schedules HASH
-- KEYS[3] schedules_due ZSET
-- KEYS[4] schedules_seen ZSET
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] replace 1: change what another peer declared, 0: store only those that are missing
-- ARGV[4] expire_s s until all schedules of a mesh without peers are forgotten
-- ARGV[5..] names and definitions in turn
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not replace what a newer peer declared
-- NUMBERED
local schedules, schedules_due, schedules_seen = KEYS[2], KEYS[3], KEYS[4]
local replace, expire_s = ARGV[3] == '1', ARGV[4]

redis.call('ZCARD', schedules_due)
redis.call('ZCARD', schedules_seen)
local now, led = now_ms(), digits(whole_number(redis.call('HGET', schedules, 'led'), 0))
for i = 5, #ARGV, 2 do
  local name, value = ARGV[i], ARGV[i + 1]
  local kept = redis.call('HMGET', schedules, 'def ' .. name, 'paused ' .. name)
  local changed = not kept[1] or replace and kept[1] ~= value
  if changed then
    redis.call('HSET', schedules, 'def ' .. name, value, 'last ' .. name, digits(now))
    redis.call('HDEL', schedules, 'next ' .. name, 'owed ' .. name)
  end
  if not kept[2] and (changed or not redis.call('ZSCORE', schedules_due, name)) then
    schedule_check(schedules_due, name, digits(now))
  end
  redis.call('ZADD', schedules_seen, led, name)
end
store_clock(schedules, now)
for _, key in ipairs({schedules, schedules_due, schedules_seen}) do
  redis.call('EXPIRE', key, expire_s)
end
return {'ok'}
