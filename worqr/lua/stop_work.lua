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
-- USES take_back producer
local producer, queue = KEYS[1], KEYS[2]
local number, lowest, worker, limit = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

local before = replied(producer, number, lowest)
if before then
  return before
end
return remember(producer, number, lowest, take_back(queue, worker, limit, ''))
