-- The field 'clock' is the latest server time at which schedules were judged. It shows when the clock was set back. If it was
-- set back by up to AHEAD_MS, nothing is done: a schedule waits until the clock has caught up.
local AHEAD_MS = 60000

-- True if the server's clock was set back by more than AHEAD_MS since schedules were last judged.
local function is_back(schedules, now)
  return (tonumber(redis.call('HGET', schedules, 'clock')) or 0) > now + AHEAD_MS
end

-- Stores the current time as the last time at which schedules were judged, at most once per second.
local function note_clock(schedules, now)
  if now - (tonumber(redis.call('HGET', schedules, 'clock')) or 0) >= 1000 then
    redis.call('HSET', schedules, 'clock', digits(now))
  end
end

-- Sets when a leader is to look at the schedule again.
local function look_at(schedules_due, name, ms)
  if redis.call('ZADD', schedules_due, ms, name) == 1 and redis.call('ZCARD', schedules_due) == 1 then
    redis.call('EXPIRE', schedules_due, 2592000) -- it was empty, and an empty set has no expiry
  end
end
