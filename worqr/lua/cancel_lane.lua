#!lua flags=allow-oom
-- cancel_lane: cancels the tasks of a lane in steps: those that wait, those that run, and those that are due later.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] due ZSET
-- KEYS[4] lane_claims HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] lane name
-- ARGV[4] after where the last step ended: waiting at first, then a phase and its cursor
-- ARGV[5] budget tasks to look at in one call
-- ARGV[6] reason text for callers that wait for a result
-- RETURNS ok waiting running after claim... | more (the same; call again with after) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local queue, due, lane_claims = KEYS[2], KEYS[3], KEYS[4]
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

local phase, cursor = string.match(after, '^(%l+) ?(%d*)$')
if phase == 'waiting' then
  local list = lane_list(queue, lane, redis.call('HGET', queue .. ':lanes', 'epoch'))
  local items = lane_length(list) > 0 and redis.call('RPOP', list, budget) or {}
  for _, item in ipairs(items) do
    cancel(job_id(item) or '')
  end
  take_from_lane(queue, lane, #items, now)
  phase, cursor = #items < budget and 'claims' or 'waiting', '0'
end
if phase == 'claims' then
  local found = redis.call('HSCAN', lane_claims, cursor, 'COUNT', budget)
  for i = 1, #found[2], 2 do
    local entry, of = found[2][i], found[2][i + 1]
    local waiting_id, id = string.match(entry, '^:(.*)$'), nil
    if of == lane and not waiting_id then
      id = job_id(own(redis.pcall('LINDEX', queue .. ':claim:' .. entry, 0)) or '')
      local claim, worker = store_cancel_reason(queue, id or '', reason)
      marked[#marked + 1], marked[#marked + 2], reply[#reply + 1] = claim, worker, claim
    end
    if of == lane then
      cancel(waiting_id or id or '') -- of a job that runs, one of the same id may be blocked
    end
  end
  phase, cursor = found[1] == '0' and 'due' or phase, found[1]
end
if phase == 'due' then
  local found = redis.call('ZSCAN', due, cursor, 'COUNT', budget)
  for i = 1, #found[2], 2 do
    cancel(found[2][i])
  end
  reply[1], cursor = found[1] == '0' and 'ok' or 'more', found[1]
end
request_cancels(queue, marked)
count(queue, 'cancelled', #ids, ids)
wake(queue, count_members(queue))
give_room(queue)
reply[2], reply[3], reply[4] = #ids, #marked / 2, phase == 'waiting' and phase or phase .. ' ' .. cursor
return reply
