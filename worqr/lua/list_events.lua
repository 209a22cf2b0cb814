#!lua flags=no-writes
-- list_events: entries of the log of the mesh: the newest ones, the newest first; or those after an entry, the oldest first.
-- KEYS[1] log STREAM
-- ARGV[1] limit entries
-- ARGV[2] after id of an entry, '' for the newest entries
-- RETURNS ok entry...: an entry is its id, which begins with the server's time in ms, and names and values of its fields in turn
-- RESEND safe: it only reads
local log = KEYS[1]
local limit, after = ARGV[1], ARGV[2]

local found
if after == '' then
  found = redis.call('XREVRANGE', log, '+', '-', 'COUNT', limit)
else
  found = redis.call('XRANGE', log, '(' .. after, '+', 'COUNT', limit)
end
local reply = {'ok'}
for _, entry in ipairs(found) do
  reply[#reply + 1] = entry
end
return reply
