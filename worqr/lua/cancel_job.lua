#!lua flags=allow-oom
-- cancel_job: cancels a job by its id: a waiting, due or blocked job is deleted, a running one is marked and its worker
-- notified.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] id of the job
-- ARGV[4] reason text for callers that wait for its result
-- RETURNS ok waiting claim...: how many did not run, and the claim that is marked | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local queue = KEYS[2]
local id, reason = ARGV[3], ARGV[4]

check_types(queue)
redis.call('HLEN', queue .. ':job:' .. id)
redis.call('HLEN', queue .. ':active:' .. id)
local waiting, claim = cancel_job(queue, id, reason)
wake(queue, count_members(queue))
give_room(queue)
return {'ok', waiting, claim}
