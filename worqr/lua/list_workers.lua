#!lua flags=no-writes
-- list_workers: returns the registered workers, for people.
-- KEYS[1] registered SET
-- ARGV[1] worker_stem text before the worker id in its keepalive key
-- ARGV[2] info_stem text before the worker id in the key of its facts
-- ARGV[3] work_map_stem text before the worker id in the key of its work map
-- RETURNS ok entry...: an entry is worker ttl_ms facts queues
-- RESEND safe: it only reads
local registered = KEYS[1]
local worker_stem, info_stem, work_map_stem = ARGV[1], ARGV[2], ARGV[3]

local reply = {'ok'}
for _, worker in ipairs(redis.call('SMEMBERS', registered)) do
  reply[#reply + 1] = {worker, redis.call('PTTL', worker_stem .. worker), redis.call('HGETALL', info_stem .. worker),
    redis.call('SMEMBERS', work_map_stem .. worker)}
end
return reply
