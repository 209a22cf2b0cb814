#!lua flags=no-writes
-- list_shards: the queues that have several shards, and how many.
-- KEYS[1] shards HASH
-- RETURNS ok name number...: in turn
-- RESEND safe: it only reads
local shards = KEYS[1]

local reply = redis.call('HGETALL', shards)
table.insert(reply, 1, 'ok')
return reply
