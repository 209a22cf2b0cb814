-- USES entry line own record result set_aside types
-- True if the job was to begin before now and never did.
local function is_expired(fields, now)
  local until_ms = tonumber(fields.expires_at)
  if fields.expires then
    until_ms = (tonumber(fields.run_at) or 0) + tonumber(fields.expires)
  end
  return until_ms and now > until_ms and not fields.started
end

-- False if setting a task aside would meet a key of a foreign type: an error in the midst of it would lose the task.
local function can_set_aside(base, worker)
  return pcall(function()
    check_types(base)
    check_aside_types(base, worker)
  end)
end

-- Moves the last item of the list `source` under `claim` of `worker`; the claim's place in the worker's set of claims is the
-- caller's to add. Answers taken, its entry and the size of its payload; skipped, for a reference whose record is gone, has
-- no task or does not wait, which it takes away; expired, when it was set aside under `claim` instead; or empty.
local function claim_last(base, source, worker, claim, now)
  local held = base .. ':claim:' .. claim
  local item = redis.pcall('RPOPLPUSH', source, held)
  if not own(item) and item then -- another application's value in the place of a claim that nobody has yet
    redis.call('DEL', held)
    item = redis.call('RPOPLPUSH', source, held)
  end
  if not item then
    return 'empty'
  end
  local id = job_id(item)
  if not id then
    return 'taken', item, #item
  end
  local job, active = base .. ':job:' .. id, base .. ':active:' .. id
  if own(redis.pcall('HGET', job, 'state')) ~= 'waiting' or redis.call('HEXISTS', job, 'task') == 0 then
    redis.call('DEL', held)
    return 'skipped'
  end
  redis.call('RENAME', job, active)
  redis.call('HSET', active, 'claim', claim, 'worker', worker, 'state', 'active')
  local entry = entry_of(base, item)
  local fields = {}
  for i = 1, #entry, 2 do
    fields[entry[i]] = entry[i + 1]
  end
  if is_expired(fields, now) and can_set_aside(base, worker) then
    local how = policy_of(base, worker)
    how.kind, how.reason, how.now, how.error_traceback = 'failed', 'expired', now, ''
    how.error_type, how.error_message = 'Expired', 'it was not started before it expired'
    set_aside(base, claim, record_of(base, item, id, claim, fields), how)
    return 'expired'
  end
  tell(base, id, 'active')
  return 'taken', entry, #fields.task
end
