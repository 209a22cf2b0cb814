#!lua flags=no-writes
-- read_batch: what is stored about a batch.
-- KEYS[1] queue LIST
-- KEYS[2] batch HASH
-- ARGV[1] id of the batch
-- RETURNS ok id facts parts: facts are names and values, parts for each part the base of its queue, its version, 1 if it is open,
--   and its counters | unknown
-- RESEND safe: it only reads
local queue, batch = KEYS[1], KEYS[2]
local id = ARGV[1]

if (own(redis.pcall('HLEN', batch)) or 0) == 0 then
  return {'unknown'}
end
return {'ok', unpack(batch_entry(queue, id))}
