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
return release_uncounted(queue, workers, claims, worker, stopped_claims)
