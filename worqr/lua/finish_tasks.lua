#!lua flags=allow-oom
-- finish_tasks: ends claims as finished; one whose cancel mark stands ends as cancelled instead.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] claims SET
-- ARGV[1] worker id
-- ARGV[2..] ended claim ids
-- RETURNS ok [claim word]...: only those that did not end as finished: cancelled, mine (settled before by this worker,
--   a resend), lost (the worker was swept: the task runs elsewhere)
-- RESEND safe: fenced by the claim
-- USES end_claim serving wake
local queue, workers, claims = KEYS[1], KEYS[2], KEYS[3]
local worker = ARGV[1]

-- Wrong types show themselves before the first write.
redis.call('HLEN', queue .. ':counts')
local anything_marked = redis.call('SCARD', queue .. ':cancelling') > 0
local suspects_wait = redis.call('LLEN', queue .. ':suspects') > 0 and redis.call('SCARD', queue .. ':hungry') > 0
local why_not = why_not_held(workers, worker)

-- One call for many claims where that is possible: most of a script's time is spent in calling commands one by one.
local reply, finished = {'ok'}, 0
for from = 2, #ARGV, 1000 do
  local named = {}
  for i = from, math.min(from + 999, #ARGV) do
    local ended = ARGV[i]
    named[#named + 1] = ended
  end
  local held = redis.call('SMISMEMBER', claims, unpack(named))
  redis.call('SREM', claims, unpack(named))
  for i, claim in ipairs(named) do
    local was_there = held[i] == 1 and end_claim(queue, claim)
    local word = was_there and 'finished' or why_not
    if held[i] == 1 and anything_marked and take_mark(queue, claim) then
      word = 'cancelled'
    end
    if word == 'finished' then
      finished = finished + 1
    else
      reply[#reply + 1] = claim
      reply[#reply + 1] = word
    end
  end
end
tally(queue, 'finished', finished)
if suspects_wait then
  wake(queue, 1)
end
return reply
