#!lua flags=allow-oom
-- resume: allows claims of the queue's tasks again and notifies every worker that serves it.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] paused STRING
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo a pause
-- NUMBERED
local queue, paused = KEYS[2], KEYS[3]

check_types(queue)
redis.call('DEL', paused)
count(queue, 'resumed', 1)
redis.pcall('PUBLISH', queue, 'resumed')
return {'ok'}
