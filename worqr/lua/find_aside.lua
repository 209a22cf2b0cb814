#!lua flags=no-writes
-- find_aside: finds the claims under which jobs failed, the newest of each id first; an id that is given twice gets two.
-- KEYS[1] queue LIST
-- KEYS[2] list ZSET
-- KEYS[3] dead_letter_index HASH
-- ARGV[1..] named ids
-- RETURNS ok claim...: as many as were found
-- RESEND safe: it only reads
local queue, list, dead_letter_index = KEYS[1], KEYS[2], KEYS[3]

local MOST_STEPS = 1000 -- from one claim of an id to the one before it; claims that another application has linked may go round

local reply, next_claim, steps = {'ok'}, {}, 0
for i = 1, #ARGV do
  local named = ARGV[i]
  local claim = next_claim[named]
  if claim == nil then
    claim = own(redis.pcall('HGET', dead_letter_index, named))
  end
  while claim and not own(redis.pcall('ZSCORE', list, claim)) do
    steps = steps + 1
    claim = steps < MOST_STEPS and own(redis.pcall('HGET', queue .. ':aside:' .. claim, 'older'))
  end
  if claim then
    reply[#reply + 1] = claim
    claim = own(redis.pcall('HGET', queue .. ':aside:' .. claim, 'older'))
  end
  next_claim[named] = claim
end
return reply
