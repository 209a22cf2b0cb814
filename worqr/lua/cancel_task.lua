#!lua flags=allow-oom
-- cancel_task: cancels every task of a queue with this payload: waiting ones are removed, running ones are marked and their
-- workers told. One script sees all of the queue as long as no more than budget claims are held on it.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] counts HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] task bytes
-- ARGV[4] cursor among the twins, 0 at first, - when they are done
-- ARGV[5] after place among the claims up to which they were looked at, - at first
-- ARGV[6] budget claims, and twins, to look at in one call
-- ARGV[7] reason text for whoever waits for a result
-- RETURNS ok waiting running cursor after claim... | more (the same; call again with cursor and after) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- USES cancel reference mark counts types
local queue, counts = KEYS[2], KEYS[3]
local task = ARGV[3]
local cursor, after, budget, reason = ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]

check_types(queue)
redis.call('HLEN', counts)
local holders, ttl = holders_of(queue), any_result_ttl(queue)

local reply = {'ok', 0, 0, cursor, after}
local raw, jobs = not job_id(task) and redis.call('LREM', queue, 0, task) or 0, 0
local twins = queue .. ':twins:' .. redis.sha1hex(task)
if cursor ~= '-' then
  local page = redis.call('SSCAN', twins, cursor, 'COUNT', budget)
  cursor = page[1] == '0' and '-' or page[1]
  for _, id in ipairs(page[2]) do
    local claim = cancel_running(queue, id, reason)
    if claim then
      reply[#reply + 1] = claim
    elseif redis.call('EXISTS', queue .. ':job:' .. id) == 0 then
      redis.call('SREM', twins, id)
    else
      jobs = jobs + cancel_waiting(queue, id, ttl, reason)
    end
  end
end
if cursor == '-' and not job_id(task) then
  after = each_claim(queue, holders, after, budget, function(claim)
    if redis.call('LPOS', queue .. ':claim:' .. claim, task) then
      mark(queue, claim)
      reply[#reply + 1] = claim
    end
  end)
end
tally(queue, 'cancelled', raw + jobs)
local word = cursor == '-' and after == '-' and 'ok' or 'more'
reply[1], reply[2], reply[3], reply[4], reply[5] = word, raw + jobs, #reply - 5, cursor, after
return reply
