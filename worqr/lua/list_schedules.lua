#!lua flags=no-writes
-- list_schedules: one page of the facts about all schedules of the mesh, and the server's time. The facts about one schedule
-- may be spread over several pages, and may be repeated.
-- KEYS[1] schedules HASH
-- ARGV[1] cursor of the page before; 0 for the first
-- ARGV[2] budget, how many facts to return, approximately
-- RETURNS ok now_ms cursor fields: the cursor of the next page (0: this was the last), names and values in turn; a name is def,
--   last, next, fired, owed, over or paused, a space, and the schedule's name
-- RESEND safe: it only reads
local schedules = KEYS[1]
local cursor, budget = ARGV[1], ARGV[2]

local page = redis.call('HSCAN', schedules, cursor, 'COUNT', budget)
return {'ok', digits(now_ms()), page[1], page[2]}
