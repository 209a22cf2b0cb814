#!lua flags=allow-oom
-- finish_tasks: ends claims as finished, keeps the results of jobs, puts blocked jobs into the queue. A claim with a cancel
-- mark ends as cancelled instead, without a result.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] claims SET
-- KEYS[4] policy HASH
-- ARGV[1] worker id
-- ARGV[2] results among what follows
-- ARGV[3..] ended first, for each result, claim id, kind (bytes, json, none) and value; then the ids of all ended claims
-- RETURNS ok [claim status]...: only those that did not end as finished: cancelled, mine (settled before by this worker,
--   a resend), lost (the worker counted as dead: the task runs elsewhere)
-- RESEND safe: fenced by the claim
local queue, workers, claims, policy = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local worker, results = ARGV[1], tonumber(ARGV[2])

-- A key of a wrong type is an error before the first write. Keys for blocked jobs and suspects are checked if there are some.
redis.call('HLEN', queue .. ':counts')
local none_blocked = redis.call('SCARD', queue .. ':blocked') == 0
local suspects_wait = redis.call('LLEN', queue .. ':suspects') > 0 and redis.call('SCARD', queue .. ':hungry') > 0
if suspects_wait or not none_blocked then
  check_types(queue)
end
local anything_marked = redis.call('SCARD', queue .. ':cancelling') > 0
local unheld = unheld_status(workers, worker)
local no_result = {'kind', 'none', 'value', ''}
local ttl, now = tonumber(redis.call('HGET', policy, 'result_ttl')) or 0, not none_blocked and now_ms()
local subscribers = redis.pcall('PUBSUB', 'NUMSUB', queue .. ':events', queue .. ':event_ends')
local ids = subscribers[2] and subscribers[2] > 0 and {}
local ends = ids and {} or nil

local results_of = {}
for i = 3, 2 + 3 * results, 3 do
  local ended, kind, value = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  results_of[ended] = {'kind', kind, 'value', value}
end

-- One call for many claims where that is possible: calling commands one by one takes most of a script's time.
local reply, finished, ready, freed = {'ok'}, 0, 0, 0
for from = 3 + 3 * results, #ARGV, 1000 do
  local named = {}
  for i = from, math.min(from + 999, #ARGV) do
    local ended = ARGV[i]
    named[#named + 1] = ended
  end
  local held = redis.call('SMISMEMBER', claims, unpack(named))
  redis.call('SREM', claims, unpack(named))
  for i, claim in ipairs(named) do
    local status, id, item = held[i] == 1 and 'finished' or unheld, nil, nil
    if held[i] == 1 then
      status = anything_marked and take_cancel_request(queue, claim) and 'cancelled' or status
      local put
      put, id, item = end_claim(queue, claim, status, results_of[claim] or no_result, ttl, now, none_blocked)
      if status == 'cancelled' then
        count(queue, 'cancelled', 1, {id})
      elseif not put then
        status = unheld
      end
      ready = ready + (put or 0)
    end
    if status == 'finished' then
      finished = finished + 1
      if ids then
        ids[#ids + 1] = id
        ends[#ends + 1] = {worker, id or false, item, results_of[claim] or no_result}
      end
    else
      reply[#reply + 1] = claim
      reply[#reply + 1] = status
    end
  end
  freed = freed + free_room(queue, named, held)
end
count(queue, 'finished', finished, ids, subscribers, nil, ends)
ready = ready + count_members(queue)
wake(queue, math.max(ready, freed, suspects_wait and 1 or 0))
return reply
