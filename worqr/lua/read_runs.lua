#!lua flags=no-writes
-- read_runs: the totals of the runs of a queue. A value of another application in their place counts as none.
-- KEYS[1] runs HASH
-- RETURNS ok totals: field and value in turn
-- RESEND safe: it only reads
local runs = KEYS[1]

return {'ok', own(redis.pcall('HGETALL', runs)) or {}}
