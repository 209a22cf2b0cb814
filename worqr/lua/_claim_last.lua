-- True if the job was to begin before now and never began.
local function is_expired(fields, now)
  local until_ms = tonumber(fields.expires_at)
  if fields.expires then
    until_ms = (tonumber(fields.run_at) or 0) + tonumber(fields.expires)
  end
  return until_ms and now > until_ms and not fields.started
end

-- Moves the last item of the list `source` under `claim` of `worker`. The caller adds the claim to the worker's set of claims.
-- Returns taken, the entry and the size of its payload; skipped, for a reference whose record is gone, has no task or does not
-- wait (the reference is removed); expired, if it went to the dead-letter queue under `claim` instead; or empty.
local function claim_last(base, source, worker, claim, now)
  local held = base .. ':claim:' .. claim
  local item = redis.pcall('RPOPLPUSH', source, held)
  if item and item.err then -- another application's value at the key of a claim that no worker holds yet
    own(item)
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
  if is_expired(fields, now) and expire(base, item, id, claim, worker, fields, now) then
    return 'expired'
  end
  tell(base, id, 'active')
  return 'taken', entry, #fields.task
end
