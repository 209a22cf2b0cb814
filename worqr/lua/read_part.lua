#!lua flags=no-writes
-- read_part: what a queue knows of a batch.
-- KEYS[1] part HASH
-- KEYS[2] part_members SET
-- RETURNS ok members name value...: members is how many have not ended
-- RESEND safe: it only reads
local part, part_members = KEYS[1], KEYS[2]

local reply = own(redis.pcall('HGETALL', part)) or {}
table.insert(reply, 1, own(redis.pcall('SCARD', part_members)) or 0)
table.insert(reply, 1, 'ok')
return reply
