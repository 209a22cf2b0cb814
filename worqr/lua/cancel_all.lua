#!lua flags=allow-oom
-- cancel_all: cancels every task of a queue: what waits is put out of reach, what runs is marked and its workers told.
-- One script sees all of the queue as long as no more than budget claims are held on it.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] after worker id up to which claims were looked at, - at first
-- ARGV[4] budget claims to look at in one call
-- RETURNS ok waiting running after claim... | more (the same; call again with after) | busy (purge_queue first) | late
-- RESEND safe: the reply is stored under the producer's number
-- USES clear mark producer
local producer, queue = KEYS[1], KEYS[2]
local number, lowest, after, budget = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

local before = replied(producer, number)
if before then
  return before
end
local waiting = 0
if after == '-' then
  waiting = clear(queue)
  if not waiting then
    return {'busy'}
  end
end
local marked = {}
after = each_claim(queue, after, budget, function(claim)
  mark(queue, claim)
  marked[#marked + 1] = claim
end)
tally(queue, 'cancelled', waiting)
local word = after == '-' and 'ok' or 'more'
return remember(producer, number, lowest, {word, waiting, #marked, after, unpack(marked)})
