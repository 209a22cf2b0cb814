#!lua flags=allow-oom
-- stop_work: a worker leaves a queue: out of the fence first, then its claims go back to the front in their old order,
-- uncounted. Call again while it answers more.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] worker id
-- ARGV[4] limit claims given back in one call
-- RETURNS ok given cancelled aside | more given cancelled aside | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not put a worker out that came back
-- NUMBERED
-- USES take_back
local queue = KEYS[2]
local worker, limit = ARGV[3], tonumber(ARGV[4])

return take_back(queue, worker, limit, '')
