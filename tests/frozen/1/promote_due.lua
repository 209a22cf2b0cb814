#!lua flags=allow-oom
-- Adds `n` to the counter `field` of the queue and tells those who listen to its events.
local function tally(base, field, n)
  if n == 0 then
    return
  end
  if redis.call('HINCRBY', base .. ':counts', field, n) == n then
    redis.call('EXPIRE', base .. ':counts', 2592000)
  end
  local events = base .. ':events'
  local heard = redis.pcall('PUBSUB', 'NUMSUB', events)
  if heard[2] and heard[2] > 0 then
    redis.pcall('PUBLISH', events, field .. ' ' .. string.format('%.0f', n))
  end
end

-- Adds `n` to the number of references in the lists whose record is gone (n may be negative); no event. Never below 0: there
-- are references that nobody counted, of a foreign producer or from before the counters expired.
local function tally_stale(base, n)
  if n ~= 0 then
    local stale = (tonumber(redis.call('HGET', base .. ':counts', 'stale')) or 0) + n
    if stale > 0 then
      redis.call('HSET', base .. ':counts', 'stale', stale)
    else
      redis.call('HDEL', base .. ':counts', 'stale')
    end
  end
end

-- Notes that `n` references to nothing were taken out of the lists. With nothing `left` in them there are none at all.
local function untally_stale(base, n, left)
  tally_stale(base, -n)
  if left == 0 then
    redis.call('HDEL', base .. ':counts', 'stale')
  end
end

-- How many tasks wait: what lies in the lists, without the references whose record is gone.
local function count_waiting(base)
  local items = redis.call('LLEN', base) + redis.call('LLEN', base .. ':suspects')
  return math.max(0, items - (tonumber(redis.call('HGET', base .. ':counts', 'stale')) or 0))
end

-- How many tasks are there that do not run: in line, due later, or blocked by their twins.
local function count_queued(base)
  return count_waiting(base) + redis.call('ZCARD', base .. ':due') + redis.call('SCARD', base .. ':blocked')
end

-- Milliseconds of the server's clock.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

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

-- USES line
-- Puts up to `limit` jobs whose time has come in line. Answers how many of them can be taken now.
local function promote(base, limit, now)
  local ids = redis.call('ZRANGEBYSCORE', base .. ':due', '-inf', now, 'LIMIT', 0, limit)
  local pushed = 0
  for _, id in ipairs(ids) do
    redis.call('ZREM', base .. ':due', id)
    local kept = redis.pcall('HMGET', base .. ':job:' .. id, 'state', 'suspect')
    if kept[1] == 'due' then
      pushed = pushed + put_in_line(base, id, 0, now, false, kept[2])
    end
  end
  return pushed
end

-- Reads the keys of a queue that its scripts write, so that one of a wrong type (a foreign application's) is an error before
-- the first write, not after it.
local function check_types(base)
  redis.call('LLEN', base)
  redis.call('LLEN', base .. ':suspects')
  redis.call('SCARD', base .. ':hungry')
  redis.call('SCARD', base .. ':cancelling')
  redis.call('HLEN', base .. ':workers')
  redis.call('HLEN', base .. ':counts')
  redis.call('ZCARD', base .. ':due')
  redis.call('SCARD', base .. ':blocked')
  redis.call('HLEN', base .. ':aside')
  redis.call('ZCARD', base .. ':failed')
  redis.call('ZCARD', base .. ':broken')
end

-- As check_types: what else is read and written when a task of `worker` is set aside, its failure handler's queue with it.
local function check_aside_types(base, worker)
  local failures = base .. '-fail'
  redis.call('HLEN', base .. ':policy:' .. worker)
  redis.call('LLEN', failures)
  redis.call('HLEN', failures .. ':counts')
  redis.call('SCARD', failures .. ':hungry')
end

-- Wakes up to min(n, 16) hungry workers, each on its own channel. A publish that reaches nobody moves on to the next, 64
-- tries at most: a wake-up is a hint, and the scan finds what it misses.
local function wake(base, n)
  local left, tries = math.min(n, 16), 64
  while left > 0 and tries > 0 do
    local worker = redis.call('SPOP', base .. ':hungry')
    if not worker then
      return
    end
    local heard = redis.pcall('PUBLISH', base .. ':wake:' .. worker, '1')
    if type(heard) == 'number' and heard > 0 then
      left = left - 1
    end
    tries = tries - 1
  end
end

-- Wakes one more if a suspect waits: whoever has just ended a claim may have held the one suspect it is allowed.
local function wake_for_suspects(base)
  if redis.call('LLEN', base .. ':suspects') > 0 then
    wake(base, 1)
  end
end

-- promote_due: puts jobs whose time has come in line and wakes as many workers; says when the next one is due.
-- KEYS[1] queue LIST
-- KEYS[2] due ZSET
-- ARGV[1] limit jobs in one call
-- RETURNS ok promoted next_in: ms until the next one is due, 0 if more are due now, -1 if there is none
-- RESEND safe: a copy promotes what is due then
-- USES counts promote types wake
local queue, due = KEYS[1], KEYS[2]
local limit = tonumber(ARGV[1])

check_types(queue)
local now = now_ms()
local pushed = promote(queue, limit, now)
wake(queue, pushed)
local following = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
local next_in = following[2] and math.max(0, tonumber(following[2]) - now) or -1
return {'ok', pushed, next_in}
