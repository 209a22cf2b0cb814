#!lua flags=allow-oom
-- delete_queue: puts all that waits out of reach; claims, fence and hungry stay. What runs may finish; what is given back
-- afterwards is dropped, because its claim is not above the fence number noted here.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- RETURNS ok waiting | busy (purge_queue first) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- USES clear counts
local queue = KEYS[2]

local waiting = clear(queue, 'the queue was deleted')
if not waiting then
  return {'busy'}
end
tally(queue, 'deleted', waiting)
redis.pcall('PUBLISH', queue, 'deleted')
return {'ok', waiting}
