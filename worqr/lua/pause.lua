#!lua flags=allow-oom
-- pause: stops claims of the queue's tasks; enqueueing goes on.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] paused STRING
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] reason text
-- ARGV[4] duration ms after which the pause ends, - if it does not
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo a resume
-- NUMBERED
local queue, paused = KEYS[2], KEYS[3]
local reason, duration = ARGV[3], tonumber(ARGV[4])

check_types(queue)
if duration then
  redis.call('SET', paused, reason, 'PX', digits(duration))
  announce_room(queue, duration, now_ms())
else
  redis.call('SET', paused, reason)
end
count(queue, 'paused', 1)
return {'ok'}
