#!lua flags=allow-oom
-- override_schedule: gives a schedule other times than its definition, or lets it return to those of its definition. Firings
-- count from now on. Declarations do not change an override; a pause stays.
-- KEYS[1] producer HASH
-- KEYS[2] schedules HASH
-- KEYS[3] schedules_due ZSET
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] name of the schedule
-- ARGV[4] override bytes; empty: return to the definition
-- RETURNS ok | same (it is so already) | unknown | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo what came after it
-- NUMBERED
local schedules, schedules_due = KEYS[2], KEYS[3]
local name, override = ARGV[3], ARGV[4]

redis.call('ZCARD', schedules_due)
local kept = redis.call('HMGET', schedules, 'def ' .. name, 'over ' .. name, 'last ' .. name, 'paused ' .. name)
if not kept[1] then
  return {'unknown'}
elseif (kept[2] and string.match(kept[2], '^%d+ (.*)$') or '') == override then
  return {'same'}
end
local now = now_ms()
local from = digits(now)
if kept[3] == from then
  from = digits(now + 1) -- a leader that read it within this millisecond must not store the plan of before
end
redis.call('HSET', schedules, 'last ' .. name, from)
redis.call('HDEL', schedules, 'next ' .. name, 'owed ' .. name)
if override == '' then
  redis.call('HDEL', schedules, 'over ' .. name)
else
  redis.call('HSET', schedules, 'over ' .. name, digits(now) .. ' ' .. override)
end
if not kept[4] then
  schedule_check(schedules_due, name, digits(now))
end
store_clock(schedules, now)
return {'ok'}
