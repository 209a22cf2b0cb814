#!lua flags=allow-oom
-- delete_queue: moves everything that waits to the trash; claims and workers stay. Running tasks may finish; a task that
-- is given back later is dropped, because its claim is not above the token stored here.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- RETURNS ok waiting | busy (purge_queue first) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local queue = KEYS[2]

local waiting = clear(queue, 'the queue was deleted')
if not waiting then
  return {'busy'}
end
count(queue, 'deleted', waiting)
redis.pcall('PUBLISH', queue, 'deleted')
give_room(queue)
return {'ok', waiting}
