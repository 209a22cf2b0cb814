-- USES own reference
-- A job's record says in `state` where it stands: waiting (a reference lies in a list), due (in the zset of due times),
-- blocked (the same id runs), active. A reference is only a place in line: one whose record is not waiting is skipped.

-- Tells whoever watches the job that it changed: a hint, they look.
local function tell(base, id, word)
  redis.pcall('PUBLISH', base .. ':job:' .. id, word)
end

local function state_at(run_at, now)
  return run_at > now and 'due' or 'waiting'
end

-- Puts the job `id`, whose record says where it will stand and which stands nowhere yet, in line, or among the due until
-- `run_at`. To the back, or to the `front`; a suspect goes to the suspects. Answers 1 if somebody can take it now, else 0.
local function stand(base, id, run_at, now, front, suspect)
  if run_at > now then
    local due = base .. ':due'
    redis.call('ZADD', due, string.format('%.0f', run_at), id)
    if redis.call('ZRANGE', due, 0, 0)[1] == id then
      local prefix = string.match(base, '^(.-):{')
      redis.pcall('PUBLISH', '{' .. prefix .. '}:due', string.format('%.0f ', run_at - now) .. base)
    end
    tell(base, id, 'due')
    return 0
  end
  local list = suspect and base .. ':suspects' or base
  redis.call(front and 'RPUSH' or 'LPUSH', list, MARKER .. id)
  tell(base, id, 'waiting')
  return 1
end

-- As `stand`, for a job whose record does not say it yet.
local function put_in_line(base, id, run_at, now, front, suspect)
  redis.call('HSET', base .. ':job:' .. id, 'state', state_at(run_at, now))
  return stand(base, id, run_at, now, front, suspect)
end

-- The twin that waited for the active job `id` to end: in line it goes. Answers as put_in_line, 0 if there is none.
local function unblock(base, id, now)
  if redis.call('SREM', base .. ':blocked', id) == 0 then
    return 0
  end
  local job = base .. ':job:' .. id
  local cleaned = redis.pcall('HDEL', job, 'update_data', 'update_counts', 'update_policy', 'update_low', 'update_high')
  if not own(cleaned) then
    return 0
  end
  return put_in_line(base, id, tonumber(redis.call('HGET', job, 'run_at')) or 0, now)
end
