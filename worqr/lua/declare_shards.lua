#!lua flags=allow-oom
-- declare_shards: stores how many shards queues have, unless it is stored already: the first declaration decides.
-- KEYS[1] producer HASH
-- KEYS[2] shards HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3..] queues name and declared number of shards, in turn
-- RETURNS ok stored...: the number that each of them has now | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not note what was dropped
-- NUMBERED
local shards = KEYS[2]

redis.call('HLEN', shards)
local reply = {'ok'}
for i = 3, #ARGV, 2 do
  local queue, declared = ARGV[i], ARGV[i + 1]
  redis.call('HSETNX', shards, queue, declared)
  reply[#reply + 1] = redis.call('HGET', shards, queue)
end
return reply
