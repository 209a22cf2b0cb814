#!lua flags=no-writes
-- find_keys: some of the keys of a bench, and when they expire by the server's clock; in steps, from cursor 0 to cursor 0.
-- ARGV[1] cursor
-- ARGV[2] pattern glob
-- RETURNS ok cursor [key expires: ms since 1970, -1 never]...
-- RESEND safe: it only reads
local cursor, pattern = ARGV[1], ARGV[2]

local page = redis.call('SCAN', cursor, 'MATCH', pattern, 'COUNT', 1000)
local reply = {'ok', page[1]}
for _, key in ipairs(page[2]) do
  reply[#reply + 1] = key
  reply[#reply + 1] = redis.call('PEXPIRETIME', key)
end
return reply
