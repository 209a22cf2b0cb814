#!lua flags=no-writes
-- find_task: the plain tasks with a payload that wait or run, and the jobs that were such tasks.
-- KEYS[1] queue LIST
-- ARGV[1] task bytes
-- ARGV[2] most tasks of each of the three kinds
-- ARGV[3] depth tasks at each end of the queue that are compared
-- ARGV[4] budget claims that are compared
-- RETURNS ok complete places ids claims: complete is 1 if no task with this payload is left out; a place is the number of tasks
--   that are taken before; claims are claim and worker in turn
-- RESEND safe: it only reads
local queue = KEYS[1]
local task, most, depth, budget = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

local length, places, claims = redis.call('LLEN', queue), {}, {}
local complete = length <= 2 * depth
if not job_id(task) then
  local first = redis.call('LPOS', queue, task, 'RANK', -1, 'COUNT', most, 'MAXLEN', depth)
  local rest = length - depth
  local last = rest > 0 and redis.call('LPOS', queue, task, 'COUNT', most, 'MAXLEN', math.min(rest, depth)) or {}
  for _, found in ipairs({first, last}) do
    complete = complete and #found < most
    for _, index in ipairs(found) do
      places[#places + 1] = length - 1 - index
    end
  end
  local holders = tolerant(function() return claim_holders(queue) end) or {}
  local after = each_claim(queue, holders, '-', budget, function(claim, worker)
    if #claims < 2 * most and own(redis.pcall('LPOS', queue .. ':claim:' .. claim, task)) then
      claims[#claims + 1], claims[#claims + 2] = claim, worker
    end
  end)
  complete = complete and after == '-' and #claims < 2 * most
end
local twins = own(redis.pcall('SSCAN', queue .. ':twins:' .. redis.sha1hex(task), '0', 'COUNT', most)) or {'0', {}}
return {'ok', complete and twins[1] == '0' and 1 or 0, places, twins[2], claims}
