#!lua flags=allow-oom
-- drop_schedule: forgets a schedule that no peer has declared for so long.
-- KEYS[1] schedules HASH
-- ARGV[1] name of the schedule
-- ARGV[2] unseen_ms ms
-- RETURNS ok | seen
-- RESEND safe: a copy drops only what nobody has declared meanwhile
-- USES counts
local schedules = KEYS[1]
local name, unseen_ms = ARGV[1], tonumber(ARGV[2])

local seen = tonumber(redis.call('HGET', schedules, 'seen ' .. name)) or 0
if now_ms() - seen < unseen_ms then
  return {'seen'}
end
for _, field in ipairs({'def ', 'last ', 'next ', 'fired ', 'owed ', 'seen ', 'paused '}) do
  redis.call('HDEL', schedules, field .. name)
end
return {'ok'}
