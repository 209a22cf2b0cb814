-- Time: the server's clock, the rules by which a dispatch moves a due time, and the clock of the schedules. What a schedule
-- does is in the scripts.

-- Returns the server's clock in milliseconds.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local NEVER = 9007199254740991

-- The rule by which a dispatch moves a due time, as a minimum and a maximum. Two such rules combine into one of the same form.
local function due_bounds(when, asked)
  local lower = (when == 'keep' or when == 'earlier') and 0 or asked
  local upper = (when == 'keep' or when == 'later') and NEVER or asked
  return lower, upper
end

local function clamp(value, lower, upper)
  return math.max(lower, math.min(value, upper))
end

-- True if the dispatch changes the due time of the job. A relative time is compared by its delay: the clock may advance between
-- two equal dispatches, so the resulting milliseconds may differ.
local function changes_due_time(o, kept, run_at, asked, now)
  if o.run_at or o.when == 'earlier' or o.when == 'keep' then
    return run_at ~= kept.run_at
  elseif kept.state == 'waiting' then
    return run_at > now -- else the position stays
  end
  return run_at == asked
end

-- The same for the expiry, which may be relative to the due time.
local function changes_expiry(job, o)
  local kept = redis.call('HMGET', job, 'expires', 'expires_at')
  return (kept[1] or nil) ~= o.expires or (kept[2] or nil) ~= o.expires_at or o.expires ~= nil and not o.run_at
end

-- The field 'clock' is the latest server time at which schedules were judged. It shows when the clock was set back. If it was
-- set back by up to AHEAD_MS, nothing is done: a schedule waits until the clock has caught up.
local AHEAD_MS = 60000

-- True if the server's clock was set back by more than AHEAD_MS since schedules were last judged.
local function clock_was_set_back(schedules, now)
  return (tonumber(redis.call('HGET', schedules, 'clock')) or 0) > now + AHEAD_MS
end

-- Stores the current time as the last time at which schedules were judged, at most once per second.
local function store_clock(schedules, now)
  if now - (tonumber(redis.call('HGET', schedules, 'clock')) or 0) >= 1000 then
    redis.call('HSET', schedules, 'clock', digits(now))
  end
end

-- Sets when a leader is to look at the schedule again.
local function schedule_check(schedules_due, name, ms)
  if redis.call('ZADD', schedules_due, ms, name) == 1 and redis.call('ZCARD', schedules_due) == 1 then
    redis.call('EXPIRE', schedules_due, 2592000) -- it was empty, and an empty set has no expiry
  end
end
