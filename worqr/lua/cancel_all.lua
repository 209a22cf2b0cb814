#!lua flags=allow-oom
-- cancel_all: cancels every task of a queue: waiting tasks go to the trash, running ones are marked and their workers notified.
-- A task that ran before and is given back is dropped even if it is not marked yet: none escapes, in one call or several.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] after place among the claims up to which they were looked at, - at first
-- ARGV[4] budget claims to look at in one call
-- ARGV[5] reason text for callers that wait for a result
-- RETURNS ok waiting running after claim... | more (the same; call again with after) | busy (purge_queue first) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local queue = KEYS[2]
local after, budget, reason = ARGV[3], tonumber(ARGV[4]), ARGV[5]

check_types(queue)
local holders = claim_holders(queue)
local waiting = 0
if after == '-' then
  waiting = clear(queue, reason)
  if not waiting then
    return {'busy'}
  end
end
local reply, marked = {'ok', waiting, 0, '-'}, {}
local cleared = cleared_up_to(queue)
after = each_claim(queue, holders, after, budget, function(claim, worker)
  if tonumber(claim) > cleared then
    return -- it began between two calls
  end
  local id = job_id(own(redis.pcall('LINDEX', queue .. ':claim:' .. claim, 0)) or '')
  if id then
    store_cancel_reason(queue, id, reason)
  end
  marked[#marked + 1], marked[#marked + 2], reply[#reply + 1] = claim, worker, claim
end)
request_cancels(queue, marked)
count(queue, 'cancelled', waiting)
give_room(queue)
reply[1], reply[3], reply[4] = after == '-' and 'ok' or 'more', #reply - 4, after
return reply
