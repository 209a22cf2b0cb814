#!lua flags=allow-oom
-- adopt_claims: gives claims that no worker holds to a worker id that is never registered, so that they are recovered like those of a
-- dead worker. Another program has removed them from the set of their worker, or the server has evicted it. Claims that a
-- worker holds stay.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] claims SET
-- ARGV[1] worker id that gets them, and whose set of claims is given
-- ARGV[2] known workers of the registry, one per line: they hold claims even if the queue has lost their admission
-- ARGV[3..] lost claims, 1000 at most, which may be lost
-- RETURNS ok adopted, how many
-- RESEND safe: a copy finds that they are held
local queue, workers, claims = KEYS[1], KEYS[2], KEYS[3]
local worker, known = ARGV[1], ARGV[2]

redis.call('SCARD', claims)
local named, holders, held, adopted = {}, redis.call('HKEYS', workers), {}, 0
for i = 3, #ARGV do
  local lost = ARGV[i]
  named[#named + 1] = lost
end
for holder in string.gmatch(known, '[^\n]+') do
  holders[#holders + 1] = holder
end
holders[#holders + 1] = worker
for _, holder in ipairs(holders) do
  for i, is_held in ipairs(own(redis.pcall('SMISMEMBER', queue .. ':claims:' .. holder, unpack(named))) or {}) do
    held[i] = held[i] or is_held == 1
  end
end
for i, claim in ipairs(named) do
  if not held[i] and redis.call('EXISTS', queue .. ':claim:' .. claim) == 1 then
    adopted = adopted + redis.call('SADD', claims, claim)
  end
end
if adopted > 0 then
  redis.call('HSET', workers, worker, LEAVING)
end
return {'ok', adopted}
