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
local reply, finished = {'ok'}, 0
for i = 2, #ARGV do
  local ended = ARGV[i]
  local word = 'finished'
  if redis.call('SREM', claims, ended) == 0 then
    word = why_not
  else
    end_claim(queue, ended)
    if anything_marked and take_mark(queue, ended) then
      word = 'cancelled'
    end
  end
  if word == 'finished' then
    finished = finished + 1
  else
    reply[#reply + 1] = ended
    reply[#reply + 1] = word
  end
end
tally(queue, 'finished', finished)
if suspects_wait then
  wake(queue, 1)
end
return reply
