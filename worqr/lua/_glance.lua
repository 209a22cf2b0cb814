-- USES own reference
-- What people are shown of the task `item`: its id (false for a raw one), the first 100 bytes of its payload, and of a job what
-- its record says, which is an `active` one or a `job`. `room` holds how many bytes of payload may still be read: a hash field
-- can only be read whole. What is longer is shown as empty. Of a record that another application replaced, only the id is shown.
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
