#!lua flags=no-writes
-- list_shards: returns the queues that have several shards, and how many; refuses a mesh of another wire version.
-- KEYS[1] shards HASH
-- KEYS[2] version STRING
-- ARGV[1] wire_version whole number
-- RETURNS ok name number...: in turn | version found
-- RESEND safe: it only reads
local shards, version = KEYS[1], KEYS[2]
local wire_version = ARGV[1]

local found = redis.call('GET', version)
if found and found ~= wire_version then
  return {'version', found}
end
local reply = own(redis.pcall('HGETALL', shards)) or {}
table.insert(reply, 1, 'ok')
return reply
