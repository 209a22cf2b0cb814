#!lua
-- A task item is a payload, or this marker and the id of a job whose record holds the payload.
local MARKER = '\0worqr\0'

-- The id of the job that `item` refers to; nil for a payload.
local function job_id(item)
  if string.sub(item, 1, 7) == MARKER then
    return string.sub(item, 8)
  end
  return nil
end

-- USES reference
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
  redis.call('HDEL', job, 'update_data', 'update_counts', 'update_policy', 'update_low', 'update_high')
  return put_in_line(base, id, tonumber(redis.call('HGET', job, 'run_at')) or 0, now)
end

-- USES reference
-- A hash as a table, nil if it is empty.
local function read_hash(key)
  local flat = redis.call('HGETALL', key)
  if #flat == 0 then
    return nil
  end
  local fields = {}
  for i = 1, #flat, 2 do
    fields[flat[i]] = flat[i + 1]
  end
  return fields
end

-- Writes the table `fields` into the hash `key`.
local function write_hash(key, fields)
  local flat = {}
  for name, value in pairs(fields) do
    flat[#flat + 1] = name
    flat[#flat + 1] = value
  end
  redis.call('HSET', key, unpack(flat))
end

local function record_of(item, id, claim, fields)
  return {item = item, job = id, id = id or '@' .. claim, fields = fields, task = fields.task,
    failures = tonumber(fields.failures) or 0, stalls = tonumber(fields.stalls) or 0,
    timeouts = tonumber(fields.timeouts) or 0}
end

-- What is known of the task under `claim`, read before anything is written; nil if nothing lies there, or a reference to
-- nothing.
local function read_claim(base, claim)
  local item = redis.call('LINDEX', base .. ':claim:' .. claim, 0)
  if not item then
    return nil
  end
  local id = job_id(item)
  local fields = {task = item}
  if id then
    fields = read_hash(base .. ':active:' .. id)
  end
  return fields and fields.task and record_of(item, id, claim, fields) or nil
end

-- note_progress: what handlers say about how far they are. A raw task about which something is said becomes a job.
-- KEYS[1] queue LIST
-- KEYS[2] claims SET
-- ARGV[1] worker id
-- ARGV[2..] said claim id, progress (a number as text, empty: none) and message, in turn
-- RETURNS ok noted
-- RESEND safe: fenced by the claim; the same is noted again
-- USES line record
local queue, claims = KEYS[1], KEYS[2]
local worker = ARGV[1]

local noted = 0
for i = 2, #ARGV, 3 do
  local said, progress, message = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local record = redis.call('SISMEMBER', claims, said) == 1 and read_claim(queue, said)
  if record then
    local active = queue .. ':active:' .. record.id
    if not record.job then
      local digest = redis.sha1hex(record.task)
      redis.call('HSET', active, 'task', record.task, 'twin', digest, 'claim', said, 'worker', worker,
        'state', 'active', 'first', said, 'last', said, 'queued', said)
      redis.call('SADD', queue .. ':twins:' .. digest, record.id)
      redis.call('LSET', queue .. ':claim:' .. said, 0, MARKER .. record.id)
    end
    redis.call('HSET', active, 'progress', progress, 'message', message)
    tell(queue, record.id, 'progress')
    noted = noted + 1
  end
end
return {'ok', noted}
