#!lua flags=no-writes
-- find_aside: finds the claims under which jobs failed, the newest of each id first; an id that is given twice gets two.
-- KEYS[1] queue LIST
-- KEYS[2] list ZSET
-- KEYS[3] dead_letter_index HASH
-- ARGV[1..] named ids
-- RETURNS ok claim...: as many as were found
-- RESEND safe: it only reads
local queue, list, dead_letter_index = KEYS[1], KEYS[2], KEYS[3]

local reply, next_claim = {'ok'}, {}
for i = 1, #ARGV do
  local named = ARGV[i]
  local claim = next_claim[named]
  if claim == nil then
    claim = redis.call('HGET', dead_letter_index, named)
  end
  while claim and not redis.call('ZSCORE', list, claim) do
    claim = own(redis.pcall('HGET', queue .. ':aside:' .. claim, 'older'))
  end
  if claim then
    reply[#reply + 1] = claim
    claim = own(redis.pcall('HGET', queue .. ':aside:' .. claim, 'older'))
  end
  next_claim[named] = claim
end
return reply
