#!lua flags=allow-oom
-- stop_work: ends the admission of a worker to a queue, then gives its claims back to the front in their old order. Their
-- attempts are not counted. Call again while it returns more.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] worker id
-- ARGV[4] limit claims given back in one call
-- RETURNS ok given cancelled aside | more given cancelled aside | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not remove a worker that came back
-- NUMBERED
local queue = KEYS[2]
local worker, limit = ARGV[3], tonumber(ARGV[4])

return release_all(queue, worker, limit, '')
