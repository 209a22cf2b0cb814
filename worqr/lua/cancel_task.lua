#!lua flags=allow-oom
-- cancel_task: cancels every task of a queue with this payload: waiting ones are removed, running ones are marked and their
-- workers notified. One call inspects the whole queue if no more than budget claims are held on it.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] counts HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] task bytes
-- ARGV[4] cursor among the twins, 0 at first, - when they are done
-- ARGV[5] after place among the claims up to which they were looked at, - at first
-- ARGV[6] page twins to look at in one call
-- ARGV[7] budget claims to look at in one call
-- ARGV[8] reason text for callers that wait for a result
-- RETURNS ok waiting running cursor after claim... | more (the same; call again with cursor and after) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local queue, counts = KEYS[2], KEYS[3]
local task = ARGV[3]
local cursor, after, page, budget, reason = ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7]), ARGV[8]

check_types(queue)
redis.call('HLEN', counts)
local holders, ttl = claim_holders(queue), longest_result_ttl(queue)

local reply, marked = {'ok', 0, 0, cursor, after}, {}
local function note(claim, worker)
  marked[#marked + 1], marked[#marked + 2], reply[#reply + 1] = claim, worker, claim
end

local first, raw, jobs, ids = cursor == '0' and after == '-', 0, 0, {}
local twins = queue .. ':twins:' .. redis.sha1hex(task)
if cursor ~= '-' then
  local found = redis.call('SSCAN', twins, cursor, 'COUNT', page)
  cursor = found[1] == '0' and '-' or found[1]
  for _, id in ipairs(found[2]) do
    local claim, worker = store_cancel_reason(queue, id, reason)
    if claim then
      note(claim, worker)
    elseif redis.call('EXISTS', queue .. ':job:' .. id) == 0 then
      redis.call('SREM', twins, id)
    else
      local waited = cancel_queued(queue, id, ttl, reason)
      jobs, ids[#ids + 1] = jobs + waited, waited == 1 and id or nil
    end
  end
end
if cursor == '-' and not job_id(task) then
  after = each_claim(queue, holders, after, budget, function(claim, worker)
    if own(redis.pcall('LPOS', queue .. ':claim:' .. claim, task)) then
      note(claim, worker)
    end
  end)
end
request_cancels(queue, marked)
local last = cursor == '-' and after == '-'
if (first or last) and not job_id(task) then -- in between it would only take time, and be done again
  raw = redis.call('LREM', queue, 0, task)
end
count(queue, 'cancelled', raw + jobs, ids)
wake(queue, count_members(queue))
give_room(queue)
reply[1], reply[2], reply[3], reply[4], reply[5] = last and 'ok' or 'more', raw + jobs, #reply - 5, cursor, after
return reply
