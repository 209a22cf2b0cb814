#!lua
-- skip_looks: lets the suspended jobs of a queue wait for their own times alone, not for the looks for the jobs that they have
-- started.
-- RETURNS ok
-- RESEND safe: a time that it has set stays
local suspended, job = KEYS[1] .. ':suspended', KEYS[1] .. ':job:'
local NEVER = '253402300799999' -- ms since 1970: the end of the year 9999

for _, id in ipairs(redis.call('ZRANGE', suspended, 0, -1)) do
  redis.call('ZADD', suspended, redis.call('HGET', job .. id, 'run_at') or NEVER, id)
end
return {'ok'}
