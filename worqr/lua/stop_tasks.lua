#!lua flags=allow-oom
-- stop_tasks: gives claims back to the front of the queue in their old order; the attempt is not counted.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] claims SET
-- ARGV[1] worker id
-- ARGV[2..] stopped claim ids, in any order
-- RETURNS ok [claim status]...: only those that were not given back: cancelled, dropped (the queue was deleted), gone, mine,
--   lost
-- RESEND safe: fenced by the claim
local queue, workers, claims = KEYS[1], KEYS[2], KEYS[3]
local worker = ARGV[1]
local stopped_claims = {}
for i = 2, #ARGV do
  local stopped = ARGV[i]
  stopped_claims[#stopped_claims + 1] = stopped
end
table.sort(stopped_claims, function(a, b) return tonumber(a) > tonumber(b) end)

check_types(queue)
local policy, now, release = worker_policy(queue, worker), now_ms(), release_as('')
local reply, given, ready, ids, held = {'ok'}, 0, 0, {}, {}
for _, claim in ipairs(stopped_claims) do
  local status
  local put = 0
  if redis.call('SREM', claims, claim) == 0 then
    status = unheld_status(workers, worker)
  else
    held[#held + 1] = claim
    status, put, ids[#ids + 1] = release_claim(queue, claim, release, policy, now)
  end
  ready = ready + put
  if status == 'given' then
    given = given + 1
  else
    reply[#reply + 1] = claim
    reply[#reply + 1] = status
  end
end
count(queue, 'stopped', given, ids)
ready = ready + count_members(queue)
wake(queue, math.max(ready, free_room(queue, held)))
if ready == 0 then
  wake_for_suspects(queue)
end
return reply
