-- Moves a waiting or due job to its new due time. Returns the result of put_in_line.
local function move(base, id, kept, run_at, now, front)
  if kept.state == 'waiting' then
    if run_at <= now then
      tell(base, id, 'waiting')
      return 0 -- the position stays
    end
    tally_stale(base, 1)
  else
    redis.call('ZREM', base .. ':due', id)
  end
  local suspect = redis.call('HGET', base .. ':job:' .. id, 'suspect')
  return put_in_line(base, id, run_at, now, front, suspect)
end

-- Changes the waiting, due or blocked job, field by field as the dispatch says.
-- LATER: most calls of the scripts do not need it.
local function update(base, id, o, task, number, asked, now, kept)
  local job, blocked, fields, gone = base .. ':job:' .. id, kept.state == 'blocked', {last = number}, {}
  local lower, upper = bounds_of(o.when, asked)
  local run_at = clamp(kept.run_at, lower, upper)
  local changed = o.data ~= false or resets_counts(o) or changes_time(o, kept, run_at, asked, now)
  if o.data ~= false then
    fields.task, fields.meta, fields.scheduled_for = task, o.meta, o.scheduled_for
    fields.update_data = blocked and '1' or nil
    gone = {'meta', 'scheduled_for'}
  end
  if run_at ~= kept.run_at or (o.when or 'set') == 'set' then
    changed = changed or changes_expiry(job, o)
    fields.run_at, fields.expires, fields.expires_at = digits(run_at), o.expires, o.expires_at
    gone[#gone + 1], gone[#gone + 2] = 'expires', 'expires_at'
  end
  if resets_counts(o) then
    fields.update_counts = blocked and '1' or nil
    for _, counter in ipairs({'failures', 'stalls', 'timeouts', 'suspect', 'error_type', 'error_message'}) do
      gone[#gone + 1] = counter
    end
  end
  if blocked then
    fields.update_low = digits(clamp(kept.low, lower, upper))
    fields.update_high = digits(clamp(kept.high, lower, upper))
    fields.update_policy = forced_names(o, kept.policy)
  end
  if #gone > 0 then
    redis.call('HDEL', job, unpack(gone))
  end
  write_hash(job, fields)
  changed = change_policy(job, o) or changed
  if blocked then
    tell(base, id, 'blocked')
    return 'blocked', 0
  end
  return changed and 'updated' or 'unchanged', run_at ~= kept.run_at and move(base, id, kept, run_at, now, o.front) or 0
end
