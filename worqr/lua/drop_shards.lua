#!lua flags=allow-oom
-- drop_shards: deletes the stored number of shards of a queue, if it is the number that the caller knows.
-- KEYS[1] producer HASH
-- KEYS[2] shards HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] queue name
-- ARGV[4] known number of shards
-- RETURNS ok | changed (it has another number, or none) | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not drop what was declared since
-- NUMBERED
local shards = KEYS[2]
local queue, known = ARGV[3], ARGV[4]

if redis.call('HGET', shards, queue) ~= known then
  return {'changed'}
end
redis.call('HDEL', shards, queue)
return {'ok'}
