#!lua flags=no-writes
-- The fence is a hash: worker -> number, first claim, count and suspect of its last start request. A worker whose claims are
-- given back in several steps stands there as leaving until the last: it gets nothing, but whoever looks for claims finds them.
local LEAVING = 'leaving'

-- What the fence holds of `worker`; nil if it stands outside, or leaves.
local function place_in_fence(workers, worker)
  local place = redis.call('HGET', workers, worker)
  if place and place ~= LEAVING then
    return place
  end
  return nil
end

-- Why a claim is not among those of `worker`: it settled it before (a resend), or it was swept.
local function why_not_held(workers, worker)
  return place_in_fence(workers, worker) and 'mine' or 'lost'
end

-- reconcile: which of a worker's claims are marked as to be cancelled, and which of those it names are gone.
-- KEYS[1] workers HASH
-- KEYS[2] claims SET
-- KEYS[3] cancelling SET
-- ARGV[1] worker id
-- ARGV[2..] named claim ids, after a reconnect: all that it believes to hold
-- RETURNS ok count marked... gone... (count of the marked) | not_serving
-- RESEND safe: it only reads
-- USES serving
local workers, claims, cancelling = KEYS[1], KEYS[2], KEYS[3]
local worker = ARGV[1]

if not place_in_fence(workers, worker) then
  return {'not_serving'}
end
local reply = {'ok', 0}
if redis.call('SCARD', cancelling) > 0 then
  for _, claim in ipairs(redis.call('SINTER', claims, cancelling)) do
    reply[#reply + 1] = claim
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
