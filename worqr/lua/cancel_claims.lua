#!lua flags=allow-oom
-- cancel_claims: cancels running tasks by their claims, which tasks without an id have, too: they are marked and their workers
-- notified. A claim that has ended is left out.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] cancelling SET
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] reason text for callers that wait for a result
-- ARGV[4..] named claims, 1000 at most
-- RETURNS ok claim...: those that are marked | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local queue, cancelling = KEYS[2], KEYS[3]
local reason = ARGV[3]

check_types(queue)
local holders, reply = claim_holders(queue), {'ok'}
for i = 4, #ARGV do
  local named = ARGV[i]
  local item = own(redis.pcall('LINDEX', queue .. ':claim:' .. named, 0))
  local id = item and job_id(item)
  if id then
    store_cancel_reason(queue, id, reason)
  end
  reply[#reply + 1] = item and named or nil
end
if #reply == 2 then
  request_cancel(queue, reply[2])
elseif #reply > 2 then
  redis.call('SADD', cancelling, unpack(reply, 2))
  for _, worker in ipairs(holders) do -- which of them holds a task without an id is not stored
    if redis.call('SCARD', queue .. ':claims:' .. worker) > 0 then
      redis.pcall('PUBLISH', queue .. ':wake:' .. worker, 'c')
    end
  end
end
return reply
