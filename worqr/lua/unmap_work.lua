#!lua flags=allow-oom
-- unmap_work: notes that a worker no longer serves a queue. Call it after the queue's stop_work or fail_worker returned ok.
-- KEYS[1] producer HASH
-- KEYS[2] work_map SET
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] queue name
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not unmap what was mapped again
-- NUMBERED
local work_map = KEYS[2]
local queue = ARGV[3]

redis.call('SREM', work_map, queue)
return {'ok'}
