#!lua flags=allow-oom
-- map_work: notes that a registered worker is about to serve a queue. Call it before start_work.
-- KEYS[1] producer HASH
-- KEYS[2] registered SET
-- KEYS[3] work_map SET
-- KEYS[4] queues ZSET
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] worker id
-- ARGV[4] queue name
-- ARGV[5] queues_expire_s s
-- RETURNS ok | dead (the worker was declared dead, or never registered) | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not map what was unmapped
-- NUMBERED
local registered, work_map, queues = KEYS[2], KEYS[3], KEYS[4]
local worker, queue, queues_expire_s = ARGV[3], ARGV[4], ARGV[5]

if redis.call('SISMEMBER', registered, worker) == 0 then
  return {'dead'}
end
redis.call('ZCARD', queues)
redis.call('SADD', work_map, queue)
redis.call('ZADD', queues, now_ms(), queue)
redis.call('EXPIRE', queues, queues_expire_s)
return {'ok'}
