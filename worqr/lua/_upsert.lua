-- USES cancel fence line record result
local NEVER = 9007199254740991

-- What there is of the job `id`: `job`, where it waits, is due or is blocked; `active`, true while it runs; `taken`, true while
-- its id is; `last`, the newest of its dispatches. A record in the trash is none, but `trashed` says why it lies there: that
-- holds for the whole id.
local function look_for(base, id)
  local kept = redis.call('HMGET', base .. ':job:' .. id, 'state', 'queued', 'run_at', 'last', 'update_low',
    'update_high', 'update_policy')
  local active = redis.call('HMGET', base .. ':active:' .. id, 'claim', 'last')
  local cleared = redis.call('HMGET', base .. ':counts', 'cleared', 'cleared_why')
  local trashed = kept[1] and tonumber(kept[2]) <= (tonumber(cleared[1]) or 0) and (cleared[2] or '') or nil
  local taken = redis.call('GET', base .. ':taken:' .. id)
  if trashed then
    taken = false
  end
  local seen = {active = active[1] and true, taken = taken and true, trashed = trashed, last = active[2] or taken or '0'}
  if kept[1] and not trashed then
    seen.job = {state = kept[1], run_at = tonumber(kept[3]), low = tonumber(kept[5]), high = tonumber(kept[6]),
      policy = kept[7] or ''}
    seen.last = kept[4]
  end
  return seen
end

-- Why the dispatch `o` stores nothing: duplicate, unchanged, full; nil if it does. `more`: jobs that are stored before it.
local function refusal(base, o, seen, more)
  if seen.job or seen.active or seen.taken then
    if o.exists == 'raise' then
      return 'duplicate'
    end
    return (o.exists == 'skip' or not seen.job and not seen.active) and 'unchanged' or nil
  end
  return o.max_length and count_queued(base) + more >= o.max_length and 'full' or nil
end

local function time_text(ms)
  return string.format('%.0f', ms)
end

-- The rule by which a dispatch moves a due time, as bounds to clamp it by: min and max of two such rules is one again.
local function bounds_of(when, asked)
  local lower = (when == 'keep' or when == 'earlier') and 0 or asked
  local upper = (when == 'keep' or when == 'later') and NEVER or asked
  return lower, upper
end

local function clamp(value, lower, upper)
  return math.max(lower, math.min(value, upper))
end

local function resets_counts(o)
  if o.counts == nil then
    return o.data ~= false
  end
  return o.counts
end

-- A new job. If the same id runs (`seen.active`) it is blocked, and remembers what its dispatch would have changed, should that
-- run come back instead of ending.
local function create(base, id, o, task, number, asked, now, seen)
  local job, lower, upper = base .. ':job:' .. id, bounds_of(o.when, asked)
  local fields = {task = task, run_at = time_text(asked), queued = number, first = number, last = number, meta = o.meta,
    scheduled_for = o.scheduled_for, expires = o.expires, expires_at = o.expires_at}
  for name, value in pairs(o.fields or {}) do
    fields[name] = value
  end
  if seen.trashed then
    forget_job(base, id, any_result_ttl(base), seen.trashed)
  end
  retire_result(base, id)
  if seen.active then
    fields.state, fields.update_low, fields.update_high = 'blocked', time_text(lower), time_text(upper)
    fields.update_data, fields.update_policy = o.data ~= false and '1' or nil, o.policy
    fields.update_counts = resets_counts(o) and '1' or nil
    write_hash(job, fields)
    redis.call('SADD', base .. ':blocked', id)
    tell(base, id, 'blocked')
    return 'blocked', 0
  end
  write_hash(job, fields)
  return 'created', put_in_line(base, id, asked, now, o.front and 'front' or 'back')
end

-- Replaces a field of the policy if the dispatch says so, else only fills one that is not there. True if it changed anything.
local function change_policy(job, o, forced)
  local changed = false
  for name, value in pairs(o.fields or {}) do
    if string.find(forced, ' ' .. name .. ' ', 1, true) then
      changed = redis.call('HGET', job, name) ~= value or changed
      redis.call('HSET', job, name, value)
    else
      changed = redis.call('HSETNX', job, name, value) == 1 or changed
    end
  end
  return changed
end

-- Moves a job that is in line or due to where its new due time says. Answers as put_in_line.
local function move(base, id, kept, run_at, now, front)
  if kept.state == 'waiting' then
    if run_at <= now then
      tell(base, id, 'waiting')
      return 0 -- it keeps its place
    end
    tally_stale(base, 1)
  else
    redis.call('ZREM', base .. ':due', id)
  end
  local suspect = redis.call('HGET', base .. ':job:' .. id, 'suspect')
  return put_in_line(base, id, run_at, now, front and 'front' or 'back', suspect)
end

-- Changes the job that waits, is due or is blocked, field by field as the dispatch says.
local function update(base, id, o, task, number, asked, now, kept)
  local job, blocked, fields, gone = base .. ':job:' .. id, kept.state == 'blocked', {last = number}, {}
  local lower, upper = bounds_of(o.when, asked)
  local run_at = clamp(kept.run_at, lower, upper)
  local changed = run_at ~= kept.run_at or o.data ~= false or resets_counts(o)
  if o.data ~= false then
    fields.task, fields.meta, fields.scheduled_for = task, o.meta, o.scheduled_for
    fields.update_data = blocked and '1' or nil
    gone = {'meta', 'scheduled_for'}
  end
  if run_at ~= kept.run_at or (o.when or 'set') == 'set' then
    fields.run_at, fields.expires, fields.expires_at = time_text(run_at), o.expires, o.expires_at
    gone[#gone + 1], gone[#gone + 2] = 'expires', 'expires_at'
  end
  if resets_counts(o) then
    fields.update_counts = blocked and '1' or nil
    for _, counter in ipairs({'failures', 'stalls', 'timeouts', 'suspect'}) do
      gone[#gone + 1] = counter
    end
  end
  if blocked then
    fields.update_low = time_text(clamp(kept.low, lower, upper))
    fields.update_high = time_text(clamp(kept.high, lower, upper))
    fields.update_policy = kept.policy .. ' ' .. (o.policy or '')
  end
  if #gone > 0 then
    redis.call('HDEL', job, unpack(gone))
  end
  write_hash(job, fields)
  changed = change_policy(job, o, ' ' .. (o.policy or '') .. ' ') or changed
  if blocked then
    tell(base, id, 'blocked')
    return 'blocked', 0
  end
  return changed and 'updated' or 'unchanged', run_at ~= kept.run_at and move(base, id, kept, run_at, now, o.front) or 0
end

-- One dispatch: a new job, or a change of the one that has its id. `o`: id (nil: a new one), delay or run_at (ms), when (set,
-- keep, later, earlier), exists (update, skip, raise), data, counts, policy (names of fields to replace), fields, meta,
-- expires, expires_at, scheduled_for, unique_for, max_length, front; `number` is its fence number, as text. `seen`: what
-- look_for found just now. Answers the outcome, the id, the dispatch that its handle waits for, and how many can be taken now.
local function upsert(base, o, task, number, now, seen)
  local id = o.id or '@' .. number
  seen = seen or o.id and look_for(base, id) or {last = number}
  local outcome = refusal(base, o, seen, 0)
  if outcome then
    return outcome, id, seen.last, 0
  end
  local ready
  local asked = o.run_at or now + (o.delay or 0)
  if seen.job then
    outcome, ready = update(base, id, o, task, number, asked, now, seen.job)
  else
    outcome, ready = create(base, id, o, task, number, asked, now, seen)
  end
  if o.unique_for then
    redis.call('SET', base .. ':taken:' .. id, number, 'PX', time_text(o.unique_for))
  end
  return outcome, id, number, ready
end
