#!lua flags=allow-oom
-- set_lane: sets how a lane starts tasks, in place of what workers declare, or pauses it. Tasks that run continue. If tasks may
-- start now, workers are woken.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] rules HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] lane name
-- ARGV[4] setting weight, limit, pause or resume
-- ARGV[5] value weight: a whole number of 1 to 1000; limit: text of _limits.lua, empty for none; pause: the reason; * for what
--   workers declare
-- ARGV[6] duration ms after which a pause ends, - if it does not
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo a later change
-- NUMBERED
local queue, rules = KEYS[2], KEYS[3]
local lane, setting, value, duration = ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])

local is_valid = setting == 'pause' or setting == 'resume' or value == '*'
  or setting == 'weight' and is_weight(tonumber(value)) or setting == 'limit' and are_limits(value)
assert(is_lane(lane) and is_valid, 'a lane has no such setting')
check_types(queue)
check_lane_types(queue)
local now = now_ms()
hold_lane(queue, lane)
if setting == 'pause' then
  pause_lane(queue, lane, value, duration and now + duration or 0, now)
elseif setting == 'resume' then
  redis.call('HDEL', rules, 'pause:' .. lane)
elseif value == '*' then
  redis.call('HDEL', rules, setting .. ':' .. lane)
else
  redis.call('HSET', rules, setting .. ':' .. lane, value)
end
local _, is_new = file_lane(queue, lane, now)
wake(queue, is_new and 1 or 0)
return {'ok'}
