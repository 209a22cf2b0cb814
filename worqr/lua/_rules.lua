local NEVER = 9007199254740991

-- The rule by which a dispatch moves a due time, as a minimum and a maximum. Two such rules combine into one of the same form.
local function bounds_of(when, asked)
  local lower = (when == 'keep' or when == 'earlier') and 0 or asked
  local upper = (when == 'keep' or when == 'later') and NEVER or asked
  return lower, upper
end

local function clamp(value, lower, upper)
  return math.max(lower, math.min(value, upper))
end

-- True if the dispatch changes the due time of the job. A relative time is compared by its delay: the clock may advance between
-- two equal dispatches, so the resulting milliseconds may differ.
local function changes_time(o, kept, run_at, asked, now)
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

local function resets_counts(o)
  if o.counts == nil then
    return o.data ~= false
  end
  return o.counts
end

local function names_one(names, name)
  return string.find(' ' .. names .. ' ', ' ' .. name .. ' ', 1, true) ~= nil
end

-- The names of the fields that the dispatch sets and that replace stored values, with those in `others`; nil: none.
local function forced_names(o, others)
  local forced = {}
  for _, name in ipairs(POLICY) do
    if names_one(others, name) or o.fields and o.fields[name] and names_one(o.policy or '', name) then
      forced[#forced + 1] = name
    end
  end
  return forced[1] and table.concat(forced, ' ') or nil
end

-- Replaces a field of the policy if the dispatch says so, else only sets a missing one. Returns true if it changed anything.
local function change_policy(job, o)
  local changed = false
  for name, value in pairs(o.fields or {}) do
    if names_one(o.policy or '', name) then
      changed = redis.call('HGET', job, name) ~= value or changed
      redis.call('HSET', job, name, value)
    else
      changed = redis.call('HSETNX', job, name, value) == 1 or changed
    end
  end
  return changed
end
