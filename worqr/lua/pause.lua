#!lua flags=allow-oom
-- pause: claims on the queue stop; enqueueing goes on.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] paused STRING
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] reason text
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo a resume
-- USES counts producer types
local producer, queue, paused = KEYS[1], KEYS[2], KEYS[3]
local number, lowest, reason = ARGV[1], ARGV[2], ARGV[3]

local before = replied(producer, number, lowest)
if before then
  return before
end
check_types(queue)
redis.call('SET', paused, reason)
tally(queue, 'paused', 1)
return remember(producer, number, lowest, {'ok'})
