#!lua flags=no-writes
-- reconcile: returns which of a worker's claims are marked for cancellation, and which of the claims it names are gone.
-- KEYS[1] workers HASH
-- KEYS[2] claims SET
-- KEYS[3] cancelling SET
-- ARGV[1] worker id
-- ARGV[2..] named claim ids, after a reconnect: all claims that the worker counts as its own
-- RETURNS ok count marked... gone... (count of the marked) | not_serving
-- RESEND safe: it only reads
local workers, claims, cancelling = KEYS[1], KEYS[2], KEYS[3]
local worker = ARGV[1]

if not admission_of(workers, worker) then
  return {'not_serving'}
end
local reply = {'ok', 0}
if redis.call('SCARD', cancelling) > 0 then
  for _, claim in ipairs(redis.call('SINTER', claims, cancelling)) do
    reply[#reply + 1] = string.find(claim, '^%d+$') and claim or nil
  end
  reply[2] = #reply - 2
end
for i = 2, #ARGV do
  local named = ARGV[i]
  if redis.call('SISMEMBER', claims, named) == 0 then
    reply[#reply + 1] = named
  end
end
return reply
