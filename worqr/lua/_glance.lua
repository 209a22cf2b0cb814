-- Returns the summary of the task `item` that is shown to people: its id (false for a raw task), the first 100 bytes of its
-- payload, and a job's record fields; the record is an `active` one or a `job`. `room` is how many bytes of payload may still
-- be read: a hash field can only be read whole, and a longer payload is shown as empty. If another application replaced the
-- record, only the id is shown.
local function glance(base, kind, item, room)
  local id = job_id(item)
  if not id then
    return {false, string.sub(item, 1, 100)}
  end
  local record, task = base .. ':' .. kind .. ':' .. id, ''
  local size = own(redis.pcall('HSTRLEN', record, 'task'))
  if not size then
    return {id, '', false, false, false, false, false, false, false, false, false, false, false}
  end
  if size <= room.left then
    task, room.left = redis.call('HGET', record, 'task') or '', room.left - size
  end
  local kept = redis.call('HMGET', record, 'state', 'claim', 'worker', 'run_at', 'progress', 'message', 'failures',
    'stalls', 'timeouts', 'error_type', 'error_message')
  return {id, string.sub(task, 1, 100), unpack(kept)}
end
