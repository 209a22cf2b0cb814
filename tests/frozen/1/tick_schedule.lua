#!lua flags=allow-oom
-- tick_schedule: notes up to which firing a schedule was judged, if it stands where its leader believed. Whoever declared,
-- resumed or ticked it meanwhile wins.
-- KEYS[1] schedules HASH
-- ARGV[1] name of the schedule
-- ARGV[2] was_last ms, where the leader found it
-- ARGV[3] was_owed ms..., what it found owed
-- ARGV[4] last ms, the nominal time up to which all is judged
-- ARGV[5] next_ms ms, for people
-- ARGV[6] owed ms..., firings that wait for their turn
-- ARGV[7] fired ms, the last firing that was enqueued, for people; empty: as it was
-- RETURNS ok | changed
-- RESEND safe: a copy finds it where it was to be, or moved on by somebody else
local schedules = KEYS[1]
local name, was_last, was_owed = ARGV[1], ARGV[2], ARGV[3]
local last, next_ms, owed, fired = ARGV[4], ARGV[5], ARGV[6], ARGV[7]

local kept = redis.call('HMGET', schedules, 'def ' .. name, 'last ' .. name, 'owed ' .. name)
local is_owed = kept[3] or ''
if kept[1] and kept[2] == last and is_owed == owed and (was_last ~= last or was_owed ~= owed) then
  return {'ok'} -- a copy
end
if not kept[1] or kept[2] ~= was_last or is_owed ~= was_owed then
  return {'changed'}
end
redis.call('HSET', schedules, 'last ' .. name, last, 'next ' .. name, next_ms)
if owed == '' then
  redis.call('HDEL', schedules, 'owed ' .. name)
else
  redis.call('HSET', schedules, 'owed ' .. name, owed)
end
if fired ~= '' then
  redis.call('HSET', schedules, 'fired ' .. name, fired)
end
return {'ok'}
