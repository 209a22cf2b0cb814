#!lua flags=no-writes
-- list_running: the longest-running tasks of a queue, among the claims of some of its workers, in the order of worker ids; also
-- of workers that leave. Together, the pages of all workers have the longest-running tasks of the queue.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] cancelling SET
-- ARGV[1] limit claims
-- ARGV[2] max_bytes bytes of payload of jobs that are read
-- ARGV[3] after_worker the last worker of the page before, empty for the first page
-- ARGV[4] after_claim only claims after this one; 0: all
-- ARGV[5] before_claim only claims before this one; 0: all
-- ARGV[6] most_workers whose claims are looked at in one call
-- ARGV[7] budget claims to look at in one call; those of the first worker may be more
-- ARGV[8] only worker whose claims count; empty for all
-- RETURNS ok worker entry... | more worker entry... (call again after this worker); each is claim worker cancelling summary:
--   cancelling is 1 if the run is to be cancelled, a summary is as `summarize` returns it
-- RESEND safe: it only reads
local queue, workers, cancelling = KEYS[1], KEYS[2], KEYS[3]
local limit, max_bytes, after_worker, after_claim = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local before_claim, most_workers, budget, only = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]

local holders = only == '' and (own(redis.pcall('HKEYS', workers)) or {}) or {only}
local found, looked, reply = {}, 0, {'ok', after_worker}
table.sort(holders)
for _, worker in ipairs(holders) do
  if worker > after_worker then
    local held = queue .. ':claims:' .. worker
    local claims = own(redis.pcall('SCARD', held)) or 0
    if most_workers == 0 or looked > 0 and looked + claims > budget then
      reply[1] = 'more'
      break
    end
    local oldest = claims > 0 and claims_in(held, after_claim == 0 and limit or nil) or {}
    for _, claim in ipairs(oldest) do
      if tonumber(claim) > after_claim and (before_claim == 0 or tonumber(claim) < before_claim) then
        found[#found + 1] = {claim, worker}
      end
    end
    most_workers, looked, reply[2] = most_workers - 1, looked + claims, worker
  end
end

table.sort(found, function(one, other) return tonumber(one[1]) < tonumber(other[1]) end)
local any_cancelled, room = (own(redis.pcall('SCARD', cancelling)) or 0) > 0, {left = max_bytes}
for i = 1, math.min(limit, #found) do
  local claim, worker = found[i][1], found[i][2]
  local item = own(redis.pcall('LINDEX', queue .. ':claim:' .. claim, 0)) or ''
  local is_cancelled = any_cancelled and redis.call('SISMEMBER', cancelling, claim) or 0
  reply[#reply + 1] = {claim, worker, is_cancelled, summarize(queue, 'active', item, room)}
end
return reply
