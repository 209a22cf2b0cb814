#!lua flags=no-writes
-- list_own_claims: returns the claims of a queue that a worker holds, the oldest first.
-- KEYS[1] workers HASH
-- KEYS[2] claims SET
-- ARGV[1] worker id
-- ARGV[2] limit claims
-- RETURNS ok claim... | not_serving
-- RESEND safe: it only reads
local workers, claims = KEYS[1], KEYS[2]
local worker, limit = ARGV[1], tonumber(ARGV[2])

if not admission_of(workers, worker) then
  return {'not_serving'}
end
local reply = claims_in(claims, limit)
table.insert(reply, 1, 'ok')
return reply
