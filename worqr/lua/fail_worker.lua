#!lua flags=allow-oom
-- fail_worker: takes a dead worker out of the fence of a queue and gives its claims back to the front in their old order,
-- each with one stall more; one stall before the limit to the suspects, set aside at it. Call again while it answers more.
-- KEYS[1] queue LIST
-- ARGV[1] worker id
-- ARGV[2] limit claims given back in one call
-- RETURNS ok given cancelled aside | more given cancelled aside
-- RESEND safe: worker ids are never used again, so a copy finds what is left or nothing
-- USES take_back
local queue = KEYS[1]
local worker, limit = ARGV[1], tonumber(ARGV[2])

return take_back(queue, worker, limit, 'stalls')
