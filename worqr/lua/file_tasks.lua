#!lua flags=allow-oom
-- file_tasks: puts claims of tasks that are in no lane at the back of their lanes; each is a job then. The attempt is not counted.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] claims SET
-- ARGV[1] worker id
-- ARGV[2..] filed claim id and the name of its lane, in turn
-- RETURNS ok [claim status]...: only those that are in no lane now: cancelled, dropped (the queue was deleted), gone, mine, lost
-- RESEND safe: fenced by the claim
local queue, workers, claims = KEYS[1], KEYS[2], KEYS[3]
local worker = ARGV[1]
local named, lanes = {}, {}
for i = 2, #ARGV, 2 do
  local filed, lane = ARGV[i], ARGV[i + 1]
  if not is_lane(lane) then
    return redis.error_reply('ERR a lane has a name of 1 to 200 bytes of UTF-8 without control characters')
  end
  named[#named + 1], lanes[#lanes + 1] = filed, lane
end

check_types(queue)
check_lane_types(queue)
local policy, now, release = worker_policy(queue, worker), now_ms(), release_as('')
local reply, given, ready, ids, held = {'ok'}, 0, 0, {}, {}
for i, claim in ipairs(named) do
  local status
  local put = 0
  if redis.call('SREM', claims, claim) == 0 then
    status = unheld_status(workers, worker)
  else
    held[#held + 1], release.lane = claim, lanes[i]
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
wake_for_suspects(queue)
return reply
