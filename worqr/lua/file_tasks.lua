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
return release_uncounted(queue, workers, claims, worker, named, lanes)
