#!lua flags=allow-oom
-- finish_tasks: ends claims as finished; one whose cancel mark stands ends as cancelled instead.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] claims SET
-- KEYS[4] suspects LIST
-- ARGV[1] worker id
-- ARGV[2..] ended claim ids
-- RETURNS ok [claim word]...: only those that did not end as finished: cancelled, mine (settled before by this worker,
--   a resend), lost (the worker was swept: the task runs elsewhere)
-- RESEND safe: fenced by the claim
-- USES end_claim wake
local queue, workers, claims, suspects = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local worker = ARGV[1]

local reply, finished = {'ok'}, 0
for i = 2, #ARGV do
  local claim = ARGV[i]
  local word = 'finished'
  if redis.call('SREM', claims, claim) == 0 then
    word = redis.call('HEXISTS', workers, worker) == 1 and 'mine' or 'lost'
  else
    end_claim(queue, claim)
    if take_mark(queue, claim) then
      word = 'cancelled'
    end
  end
  if word == 'finished' then
    finished = finished + 1
  else
    reply[#reply + 1] = claim
    reply[#reply + 1] = word
  end
end
tally(queue, 'finished', finished)
if redis.call('LLEN', suspects) > 0 then
  wake(queue, 1)
end
return reply
