#!lua flags=allow-oom
-- cancel_lane: cancels the tasks of a lane in steps: those that are due later, those that a run of their id blocks, those that
-- wait, and those that run.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] due ZSET
-- KEYS[4] blocked SET
-- KEYS[5] lane_claims HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] lane name
-- ARGV[4] after where the last step ended, a phase and its cursor; due 0 at first
-- ARGV[5] budget tasks to look at in one call
-- ARGV[6] reason text for callers that wait for a result
-- RETURNS ok waiting running after claim... | more (the same; call again with after) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local queue, due, blocked, lane_claims = KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lane, after, budget, reason = ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]

check_types(queue)
check_lane_types(queue)
local reply, ids, marked, now, ttl = {'more', 0, 0, after}, {}, {}, now_ms(), longest_result_ttl(queue)
-- Cancels the job if it is of this lane and does not run. A reference may be to a job that was dispatched again, in another lane.
local function cancel(id)
  local is_here = own(redis.pcall('HGET', queue .. ':job:' .. id, 'lane')) == lane
  if is_here and cancel_queued(queue, id, ttl, reason) == 1 then
    ids[#ids + 1] = id
  end
end

-- In this order, none that was there at the first step is missed: jobs become waiting, and then they run.
local phase, cursor = string.match(after, '^(%l+) (%d+)$')
if phase == 'due' then
  local found = redis.call('ZSCAN', due, cursor, 'COUNT', budget)
  for i = 1, #found[2], 2 do
    cancel(found[2][i])
  end
  phase, cursor = found[1] == '0' and 'blocked' or phase, found[1]
end
if phase == 'blocked' then
  local found = redis.call('SSCAN', blocked, cursor, 'COUNT', budget)
  for _, id in ipairs(found[2]) do
    cancel(id)
  end
  phase, cursor = found[1] == '0' and 'waiting' or phase, found[1]
end
if phase == 'waiting' then
  local list = lane_list(queue, lane, redis.call('HGET', queue .. ':lanes', 'epoch'))
  local items = lane_length(list) > 0 and redis.call('RPOP', list, budget) or {}
  for _, item in ipairs(items) do
    cancel(job_id(item) or '')
  end
  take_from_lane(queue, lane, #items, now)
  phase, cursor = #items < budget and 'claims' or phase, '0'
end
if phase == 'claims' then
  local found = redis.call('HSCAN', lane_claims, cursor, 'COUNT', budget)
  for i = 1, #found[2], 2 do
    local entry, of = found[2][i], found[2][i + 1]
    local suspect = string.match(entry, '^:(.*)$')
    if of == lane and suspect then
      cancel(suspect)
    elseif of == lane then
      local id = job_id(own(redis.pcall('LINDEX', queue .. ':claim:' .. entry, 0)) or '')
      local claim, worker = store_cancel_reason(queue, id or '', reason)
      marked[#marked + 1], marked[#marked + 2], reply[#reply + 1] = claim, worker, claim
    end
  end
  reply[1], cursor = found[1] == '0' and 'ok' or 'more', found[1]
end
request_cancels(queue, marked)
count(queue, 'cancelled', #ids, ids)
wake(queue, count_members(queue))
give_room(queue)
reply[2], reply[3], reply[4] = #ids, #marked / 2, phase .. ' ' .. cursor
return reply
