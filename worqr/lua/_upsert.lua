-- A new job. It is blocked if the same id runs (`seen.active`).
local function create(base, id, o, task, number, asked, now, seen)
  local job = base .. ':job:' .. id
  local fields = {task = task, run_at = digits(asked), queued = number, first = number, last = number, meta = o.meta,
    scheduled_for = o.scheduled_for, expires = o.expires, expires_at = o.expires_at}
  if o.fields then
    for name, value in pairs(o.fields) do
      fields[name] = value
    end
  end
  if seen.trashed then
    forget_trashed(base, id, seen.trashed)
  end
  if o.id then
    retire_result(base, id)
  end
  if seen.active then
    return block(base, id, o, fields, asked)
  end
  fields.state = state_at(asked, now)
  write_hash(job, fields)
  return 'created', stand(base, id, asked, now, o.front)
end

-- Runs one dispatch: stores a new job, or changes the job that has its id. `o`: id (nil: a new one, made with `random`), delay
-- or run_at (ms), when (set, keep, later, earlier), exists (update, skip, raise), data, counts, policy (names of fields to
-- replace), fields, meta, expires, expires_at, scheduled_for, unique_for, max_length, front. `number` is its fence number, as
-- text. `seen`: what look_for found just now. Returns the outcome, the id, the dispatch that its handle waits for, how many
-- tasks became claimable, and how many jobs were added (0 or 1).
local function upsert(base, o, task, number, now, seen)
  local id = o.id or new_id(base, number, o.random)
  seen = seen or o.id and look_for(base, id) or {last = number}
  local outcome = refusal(base, o, seen, 0)
  if outcome then
    return outcome, id, seen.last, 0, 0
  end
  local ready
  local asked = o.run_at or now + (o.delay or 0)
  if seen.job then
    outcome, ready = update(base, id, o, task, number, asked, now, seen.job)
  else
    outcome, ready = create(base, id, o, task, number, asked, now, seen)
  end
  if o.unique_for then
    redis.call('SET', base .. ':taken:' .. id, number, 'PX', digits(o.unique_for))
  end
  return outcome, id, number, ready, seen.job and 0 or 1
end
