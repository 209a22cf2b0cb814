#!lua flags=allow-oom
-- fail_worker: ends the admission of a dead worker to a queue. Its claims go back to the front in their old order, each
-- with one stall more. A task becomes a suspect one stall before the limit, and fails at it. Call again while it returns more.
-- KEYS[1] queue LIST
-- ARGV[1] worker id
-- ARGV[2] limit claims given back in one call
-- RETURNS ok given cancelled aside | more given cancelled aside
-- RESEND safe: worker ids are never used again, so a copy finds what is left or nothing
local queue = KEYS[1]
local worker, limit = ARGV[1], tonumber(ARGV[2])

return release_all(queue, worker, limit, 'stalls')
