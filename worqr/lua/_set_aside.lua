-- Enqueues the job of the queue's failure handler: the unchanged payload, and how the task failed.
local function post_failure(base, claim, task, facts)
  local failures = base .. '-fail'
  local id, fence = new_id(failures, 'f' .. claim), next_fence(failures)
  note_fence(failures, fence)
  local number = digits(fence)
  write_hash(failures .. ':job:' .. id, {task = task, failed = cmsgpack.pack(facts), run_at = facts.at,
    queued = number, first = number, last = number})
  put_in_line(failures, id, 0, 0)
  tally(failures, 'enqueued', 1, {id})
  wake(failures, 1)
end

-- Ends `claim` by moving its task to the dead-letter queue, and enqueues the failure handler's job in the same step. `how`:
-- kind (failed, broken), reason, keep (cap of failed, as text; '0': none), on_failure, ttl, worker, now, error_type,
-- error_message, error_traceback, error_fields (nil: none). Returns how many blocked jobs became claimable.
local function set_aside(base, claim, record, how)
  local facts = {id = record.id, reason = how.reason, error_type = how.error_type, error_message = how.error_message,
    error_traceback = how.error_traceback, error_fields = how.error_fields, failures = record.failures,
    stalls = record.stalls, timeouts = record.timeouts, worker = how.worker, at = string.format('%.0f', how.now),
    meta = record.fields.meta}
  if how.on_failure then
    post_failure(base, claim, record.task, facts)
  end
  list_aside(base, claim, record, facts, how)
  if record.fields.twin then
    forget_twin(base, record.fields.twin, record.id)
  end
  redis.call('DEL', base .. ':active:' .. record.id, base .. ':claim:' .. claim)
  tally(base, how.kind, 1, {record.id})
  if not record.job then
    return 0
  end
  local error = {'error_type', how.error_type, 'error_message', how.error_message, 'error_traceback',
    how.error_traceback}
  if how.error_fields then
    error[7], error[8] = 'error_fields', how.error_fields
  end
  local fields = record.fields
  local result = keep_result(base, record.id, fields.first, fields.last, fields.result_ttl, how.ttl, 'failed', error)
  if result then
    local tries = {record.failures, record.stalls, record.timeouts, fields.progress or '', fields.message or ''}
    note_tries(result, tries, how.kind == 'broken' and 1 or 0)
  end
  return unblock(base, record.id, how.now)
end
