#!lua flags=no-writes
-- list_schedules: all schedules of the mesh, and what time it is.
-- KEYS[1] schedules HASH
-- RETURNS ok now_ms fields: names and values in turn; a name is def, last, next, fired, owed, seen or paused, a space, and the
--   schedule's name
-- RESEND safe: it only reads
-- USES counts fence
local schedules = KEYS[1]

return {'ok', digits(now_ms()), redis.call('HGETALL', schedules)}
