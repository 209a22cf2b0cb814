#!lua flags=allow-oom
-- pause: stops claims of the queue's tasks; enqueueing goes on.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] paused STRING
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] reason text
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo a resume
-- NUMBERED
local queue, paused = KEYS[2], KEYS[3]
local reason = ARGV[3]

check_types(queue)
redis.call('SET', paused, reason)
count(queue, 'paused', 1)
return {'ok'}
