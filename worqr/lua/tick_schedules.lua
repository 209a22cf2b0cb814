#!lua flags=allow-oom
-- tick_schedules: stores how far schedules got, each only if it is as its leader read it: a concurrent declaration, resume or
-- tick wins. Then returns the schedules that a leader is to look at now.
-- KEYS[1] schedules HASH
-- KEYS[2] schedules_due ZSET
-- ARGV[1] limit, how many due schedules to return at most
-- ARGV[2] was_led ms for which the mesh was led, as the leader read it before
-- ARGV[3] led ms, the same and the time since
-- ARGV[4..] names of the schedules to note, each with where it was found (last, a line break, owed...), and where it is now:
--   last, next (empty: as it was), look_at, fired (likewise: the last firing that was enqueued), owed..., each after a space
-- RETURNS ok now_ms led next_ms row... | back (the clock was set back: call rewind_schedules first); next_ms: when the next one
--   is due, or empty; a row is definition, last, next, fired, owed, over (each may be missing) and name
-- RESEND safe: a copy finds the schedule as it stored it, or changed by another process
local schedules, schedules_due = KEYS[1], KEYS[2]
local limit, was_led, led = ARGV[1], ARGV[2], ARGV[3]
local MAX_BYTES = 1048576 -- of definitions in one reply

redis.call('ZCARD', schedules_due)
local now = now_ms()
if redis.call('HLEN', schedules) == 0 then
  return {'ok', digits(now), '0', ''}
elseif clock_was_set_back(schedules, now) then
  return {'back'}
end
store_clock(schedules, now)
local stored_led = digits(whole_number(redis.call('HGET', schedules, 'led'), 0))
if was_led ~= led and stored_led == was_led then
  redis.call('HSET', schedules, 'led', led)
end

local function note(name, was, is)
  local kept = redis.call('HMGET', schedules, 'def ' .. name, 'last ' .. name, 'owed ' .. name, 'paused ' .. name)
  local last, next_ms, at, fired, owed = string.match(is, '^(%d+) (%d*) (%d+) (%d*) (.*)$')
  if not kept[1] or (kept[2] or '') .. '\n' .. (kept[3] or '') ~= was or tonumber(last) > now + AHEAD_MS then
    return
  end
  redis.call('HSET', schedules, 'last ' .. name, last)
  if next_ms ~= '' then
    redis.call('HSET', schedules, 'next ' .. name, next_ms)
  end
  if owed ~= '' then
    redis.call('HSET', schedules, 'owed ' .. name, owed)
  elseif kept[3] then
    redis.call('HDEL', schedules, 'owed ' .. name)
  end
  if fired ~= '' then
    redis.call('HSET', schedules, 'fired ' .. name, fired)
  end
  if not kept[4] then
    schedule_check(schedules_due, name, at)
  end
end

for i = 4, #ARGV, 3 do
  local name, was, is = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  note(name, was, is)
end
local reply, bytes = {'ok', digits(now), digits(whole_number(redis.call('HGET', schedules, 'led'), 0)), ''}, 0
for _, name in ipairs(redis.call('ZRANGEBYSCORE', schedules_due, '-inf', digits(now), 'LIMIT', 0, limit)) do
  local kept = redis.call('HMGET', schedules, 'def ' .. name, 'last ' .. name, 'next ' .. name, 'fired ' .. name,
    'owed ' .. name, 'over ' .. name, 'paused ' .. name)
  if not kept[1] or kept[7] then -- gone or paused: not in the set of due schedules
    redis.call('ZREM', schedules_due, name)
  else
    kept[7], reply[#reply + 1], bytes = name, kept, bytes + #kept[1]
    if bytes > MAX_BYTES then
      break
    end
  end
end
local following = redis.call('ZRANGEBYSCORE', schedules_due, '(' .. digits(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
reply[4] = following[2] and digits(math.min(tonumber(following[2]), LATEST)) or ''
return reply
