#!lua flags=no-writes
-- list_marks: returns which of these claims are still marked for cancellation; the others have been settled.
-- KEYS[1] cancelling SET
-- ARGV[1..] named claim ids
-- RETURNS ok claim...
-- RESEND safe: it only reads
local cancelling = KEYS[1]

local reply = {'ok'}
for i = 1, #ARGV do
  local named = ARGV[i]
  if (own(redis.pcall('SISMEMBER', cancelling, named)) or 0) == 1 then
    reply[#reply + 1] = named
  end
end
return reply
