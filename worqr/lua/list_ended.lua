#!lua flags=no-writes
-- list_ended: the runs of a queue that ended last, the last one first, if its workers keep them.
-- KEYS[1] recent LIST
-- ARGV[1] limit runs
-- RETURNS ok run...: each is JSON
-- RESEND safe: it only reads
local recent = KEYS[1]
local limit = tonumber(ARGV[1])

local reply = {'ok'}
for _, run in ipairs(own(redis.pcall('LRANGE', recent, 0, limit - 1)) or {}) do
  reply[#reply + 1] = run
end
return reply
