#!lua flags=no-writes
-- list_batches: batches at home in a queue, by when the leader looks at them next: those that have not ended mostly come first.
-- KEYS[1] queue LIST
-- KEYS[2] batches ZSET
-- ARGV[1] first rank
-- ARGV[2] limit
-- RETURNS ok number entry...: number is how many there are; an entry is that of read_batch
-- RESEND safe: it only reads
local queue, batches = KEYS[1], KEYS[2]
local first, limit = tonumber(ARGV[1]), tonumber(ARGV[2])

local reply = {'ok', own(redis.pcall('ZCARD', batches)) or 0}
for _, id in ipairs(own(redis.pcall('ZRANGE', batches, first, first + limit - 1)) or {}) do
  reply[#reply + 1] = batch_entry(queue, id)
end
return reply
