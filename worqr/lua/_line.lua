-- The `state` of a job's record is waiting (a reference is in a list), due (in the zset of due times), blocked (the same id
-- runs) or active. A reference only marks a position: a reference whose record is not waiting is skipped.

-- Notifies the callers that watch the job. The message is a hint: they read the state themselves.
local function tell(base, id, word)
  redis.pcall('PUBLISH', base .. ':job:' .. id, word)
end

local function state_at(run_at, now)
  return run_at > now and 'due' or 'waiting'
end

-- Puts the job `id` into the queue, or among the due jobs until `run_at`. Its record already has the new state, and no list has
-- the job yet. To the back, or to the `front`; a suspect goes to the suspects. Returns 1 if it is claimable now, else 0.
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

-- As `stand`, but writes the state into the record too.
local function put_in_line(base, id, run_at, now, front, suspect)
  redis.call('HSET', base .. ':job:' .. id, 'state', state_at(run_at, now))
  return stand(base, id, run_at, now, front, suspect)
end

-- Puts the job that was blocked by the active job `id` into the queue. Returns the result of put_in_line, 0 if there is none.
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
