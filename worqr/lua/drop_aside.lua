#!lua flags=allow-oom
-- drop_aside: deletes records of the dead-letter queue.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] list ZSET
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3..] dropped claims under which they failed
-- RETURNS ok dropped | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local queue, list = KEYS[2], KEYS[3]

check_types(queue)
local deleted = 0
for i = 3, #ARGV do
  local dropped = ARGV[i]
  if redis.call('ZREM', list, dropped) == 1 then
    delete_dead_letter(queue, dropped)
    deleted = deleted + 1
  end
end
return {'ok', deleted}
