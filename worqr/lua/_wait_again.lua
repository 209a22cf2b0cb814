-- Merges a blocked `twin` into the job with the record `fields`, which would be due at `run_at`: field by field, as the
-- dispatches of the twin said. Returns when the job is due then.
local function merge_twin(job, fields, twin, changes, run_at)
  if twin.update_data then
    changes.task, changes.meta, changes.scheduled_for = twin.task, twin.meta, twin.scheduled_for
    redis.call('HDEL', job, 'meta', 'scheduled_for')
  end
  if twin.update_counts then
    changes.failures, changes.stalls, changes.timeouts, changes.suspect = nil, nil, nil, nil
    changes.error_type, changes.error_message = nil, nil
    redis.call('HDEL', job, 'failures', 'stalls', 'timeouts', 'suspect', 'error_type', 'error_message')
  end
  for _, name in ipairs(POLICY) do
    if twin[name] and (not fields[name] or names_one(twin.update_policy or '', name)) then
      changes[name] = twin[name]
    end
  end
  changes.last = twin.last
  return math.max(tonumber(twin.update_low), math.min(run_at, tonumber(twin.update_high)))
end

-- The first 500 bytes of a text, without a character that the cut would split.
local function beginning_of(text)
  return #text <= 500 and text or (string.gsub(string.sub(text, 1, 500), '[\192-\255][\128-\191]*$', ''))
end

-- Puts the task under `claim` back into the queue, now or at `how.run_at` (nil: now), with the counter of this return and the
-- error of the attempt that ended. A raw task with something to store becomes a job. `queued` is the fence number of its place:
-- if it is not above the number of the last clearing, the place is in the trash. Returns how many tasks became claimable, and
-- the id of the job, if it is one.
local function wait_again(base, claim, record, how, now)
  redis.call('DEL', base .. ':claim:' .. claim)
  local front, run_at, remembers = not how.back, how.run_at or now, how.counter ~= ''
  if not record.job and not remembers and run_at <= now then
    redis.call(front and 'RPUSH' or 'LPUSH', base, record.item)
    return 1
  end
  local job, changes = base .. ':job:' .. record.id, {queued = claim, started = '1'}
  if remembers then
    changes[how.counter] = record[how.counter]
  end
  if how.error_type then
    changes.error_type, changes.error_message = how.error_type, beginning_of(how.retry_message or how.error_message)
  end
  if how.run_at then
    changes.run_at, changes.retried_at = digits(run_at), how.retried_at
  end
  local max_stalls = tonumber(record.fields.max_stalls) or how.max_stalls
  if record.stalls > 0 and record.stalls >= max_stalls - 1 then
    changes.suspect = '1'
  end
  if record.job then
    local twin = redis.call('SREM', base .. ':blocked', record.id) == 1 and read_hash(job)
    redis.call('RENAME', base .. ':active:' .. record.id, job)
    redis.call('HDEL', job, 'claim', 'worker', 'progress', 'message', 'cancel_reason', 'suspect',
      'retried_at')
    if twin then
      run_at = merge_twin(job, record.fields, twin, changes, run_at)
      changes.run_at = digits(run_at)
    end
  else
    changes.task, changes.twin, changes.first, changes.last = record.task, redis.sha1hex(record.task), claim, claim
    note_twin(base, changes.twin, record.id)
  end
  write_hash(job, changes)
  return put_in_line(base, record.id, run_at, now, front, changes.suspect), record.id
end
