-- USES fence
-- The field 'clock' is the latest time of the server's clock at which schedules were judged. It shows that the clock was set
-- back. By up to AHEAD_MS nothing is done: a schedule waits until the clock has caught up.
local AHEAD_MS = 60000

-- True if the server's clock was set back by more than AHEAD_MS since schedules were judged.
local function is_back(schedules, now)
  return (tonumber(redis.call('HGET', schedules, 'clock')) or 0) > now + AHEAD_MS
end

-- Notes that schedules are judged by this time; at most once per second.
local function note_clock(schedules, now)
  if now - (tonumber(redis.call('HGET', schedules, 'clock')) or 0) >= 1000 then
    redis.call('HSET', schedules, 'clock', digits(now))
  end
end

-- Lets a leader look at the schedule at that time.
local function look_at(schedules_due, name, ms)
  if redis.call('ZADD', schedules_due, ms, name) == 1 and redis.call('ZCARD', schedules_due) == 1 then
    redis.call('EXPIRE', schedules_due, 2592000) -- it was empty, and an empty set has no expiry
  end
end
