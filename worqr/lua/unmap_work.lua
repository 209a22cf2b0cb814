#!lua flags=allow-oom
-- unmap_work: notes that a worker serves a queue no more; after the queue's stop_work or fail_worker said ok.
-- KEYS[1] producer HASH
-- KEYS[2] work_map SET
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] queue name
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not unmap what was mapped again
-- USES producer
local producer, work_map = KEYS[1], KEYS[2]
local number, lowest, queue = ARGV[1], ARGV[2], ARGV[3]

local before = replied(producer, number, lowest)
if before then
  return before
end
redis.call('SREM', work_map, queue)
return remember(producer, number, lowest, {'ok'})
