#!lua flags=allow-oom
-- start_work: admits a worker to a queue, with the handler options for its recovery, if it has all rights there.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] workers HASH
-- KEYS[4] policy HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] worker id
-- ARGV[4] max_stalls deaths of workers; at this number the task fails
-- ARGV[5] keep_failed records, 0: none
-- ARGV[6] on_failure 1: a failure handler is registered
-- ARGV[7] result_ttl ms for which results are kept, - if they are not
-- ARGV[8] last number of a start request that the worker sent to this queue before
-- ARGV[9] limits text of _limits.lua, empty: none, *: the worker declares nothing
-- ARGV[10] lanes msgpack of _lane_rules.lua, empty: none, *: the worker declares nothing
-- ARGV[11] options JSON, other options of the handler, for people; empty: not known
-- RETURNS ok changed: 1 if other limits hold now, 2 if only the workers' rules of lanes are others, else 0 | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not put a worker back that left
-- NUMBERED
local queue, workers, policy = KEYS[2], KEYS[3], KEYS[4]
local worker, max_stalls = ARGV[3], ARGV[4]
local keep_failed, on_failure, result_ttl, last, limits = ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local lanes, options = ARGV[10], ARGV[11]

local missing = missing_rights(queue)
if missing then
  return missing
end
local admission, result_ttls = admission_of(workers, worker), queue .. ':result_ttls'
assert(limits == '*' or are_limits(limits), 'limits must be like 10 100/60000')
if lanes ~= '*' and declares_other_lanes(queue, lanes) then
  declared_lanes(lanes)
  check_types(queue)
  check_lane_types(queue)
end
redis.call('ZCARD', result_ttls)
redis.call('HLEN', policy)
local changed = limits ~= '*' and set_limits(queue, 'declared', limits ~= '' and limits) and 1 or 0
if lanes ~= '*' and declare_lanes(queue, lanes, now_ms()) and changed == 0 then
  changed = 2
end
redis.call('HSET', policy, 'max_stalls', max_stalls, 'keep_failed', keep_failed, 'on_failure', on_failure)
if options == '' then
  redis.call('HDEL', policy, 'options')
else
  redis.call('HSET', policy, 'options', options)
end
if result_ttl == '-' then
  redis.call('HDEL', policy, 'result_ttl')
else
  redis.call('HSET', policy, 'result_ttl', result_ttl)
end
if (tonumber(result_ttl) or 0) > 0 then
  redis.call('ZADD', result_ttls, result_ttl, worker)
else
  redis.call('ZREM', result_ttls, worker)
end
if not admission then
  redis.call('HSET', workers, worker, last .. ' 0 0 0')
end
return {'ok', changed}
