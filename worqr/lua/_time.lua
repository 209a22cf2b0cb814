-- Time: the server's clock, the rules by which a dispatch moves a due time, and the clock of the schedules.

-- Returns the server's clock in milliseconds.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Later than every due time: the largest whole number that a double holds.
local NEVER = 9007199254740991

-- Returns the least time (ms) in a sorted set of times; nil if it is empty. Other programs may have added any score.
local function first_time(key)
  local score = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
  return score and clamp(math.floor(tonumber(score)), 0, LATEST)
end

-- Returns the rule by which a dispatch moves a due time, as a minimum and a maximum. Two such rules combine into one of the
-- same form. `asked` is the time that the dispatch asks for.
local function due_bounds(when, asked)
  local lower = (when == 'keep' or when == 'earlier') and 0 or asked
  local upper = (when == 'keep' or when == 'later') and NEVER or asked
  return lower, upper
end

-- Returns the value, or the bound that it is beyond.
local function clamp(value, lower, upper)
  return math.max(lower, math.min(value, upper))
end

-- True if the dispatch `o` changes the due time of the job. A relative time is compared by its delay: the clock may advance
-- between two equal dispatches, so the resulting milliseconds may differ.
local function changes_due_time(o, kept, run_at, asked, now)
  if o.run_at or o.when == 'earlier' or o.when == 'keep' then
    return run_at ~= kept.run_at
  elseif kept.state == 'waiting' then
    return run_at > now -- else the position stays
  end
  return run_at == asked and not (o.at_most and run_at == kept.run_at)
end

-- True if the dispatch `o` changes when the job expires, which may be relative to the due time.
local function changes_expiry(job, o)
  local kept = redis.call('HMGET', job, 'expires', 'expires_at')
  return (kept[1] or nil) ~= o.expires or (kept[2] or nil) ~= o.expires_at or o.expires ~= nil and not o.run_at
end

-- By how much the server's clock may be set back before schedules continue from the new time. If it was set back by less, a
-- schedule waits until the clock has caught up. The field 'clock' is the latest time at which schedules were judged.
local AHEAD_MS = 60000

-- True if the server's clock was set back by more than AHEAD_MS since schedules were last judged.
local function clock_was_set_back(schedules, now)
  return whole_number(redis.call('HGET', schedules, 'clock'), 0, LATEST) > now + AHEAD_MS
end

-- Stores the current time as the last time at which schedules were judged, at most once per second.
local function store_clock(schedules, now)
  if now - whole_number(redis.call('HGET', schedules, 'clock'), 0, LATEST) >= 1000 then
    redis.call('HSET', schedules, 'clock', digits(now))
  end
end

-- Sets when a leader is to check the schedule again.
local function schedule_check(schedules_due, name, ms)
  if redis.call('ZADD', schedules_due, ms, name) == 1 and redis.call('ZCARD', schedules_due) == 1 then
    redis.call('EXPIRE', schedules_due, 2592000) -- 30 days: the set was empty, and had no expiry
  end
end
