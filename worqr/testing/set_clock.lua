#!lua
-- set_clock: sets the clock of a bench.
-- ARGV[1] setting by how many ms it is ahead of the server's (or behind: negative); if it stands still, a space and the ms
--   since 1970 at which it does
-- RETURNS ok
-- RESEND safe: it sets what it set
local clock, setting = KEYS[1] .. ':clock', ARGV[1]

redis.call('SET', clock, setting)
return {'ok'}
