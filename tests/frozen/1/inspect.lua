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

-- inspect: what there is to know of one queue, for people and for the leader's scan; keeps the counters from expiring.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] due ZSET
-- KEYS[4] failed ZSET
-- KEYS[5] broken ZSET
-- KEYS[6] paused STRING
-- KEYS[7] counts HASH
-- KEYS[8] trash LIST
-- KEYS[9] trash_suspects LIST
-- KEYS[10] trash_due ZSET
-- KEYS[11] trash_blocked SET
-- KEYS[12] blocked SET
-- RETURNS ok waiting due running failed broken paused trash workers counts blocked next_in oldest: paused is false or the
--   reason, trash not 0 if there is something to purge, workers the fence's members and those who leave it, counts names and
--   values in turn, next_in ms until the next job is due (-1: none), oldest ms since the job in front was due (-1: it is none)
-- RESEND safe: it changes no task
-- USES counts reference
local queue, workers, due, failed, broken = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local paused, counts, trash, trash_suspects = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local trash_due, trash_blocked, blocked = KEYS[10], KEYS[11], KEYS[12]

local serving, running = redis.call('HKEYS', workers), 0
for _, worker in ipairs(serving) do
  running = running + redis.call('SCARD', queue .. ':claims:' .. worker)
end
local now, first_due = now_ms(), redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')[2]
local in_front = job_id(redis.call('LINDEX', queue, -1) or '')
local run_at = in_front and redis.call('HGET', queue .. ':job:' .. in_front, 'run_at')
local trashed = redis.call('EXISTS', trash, trash_suspects, trash_due, trash_blocked)
local reply = {'ok', count_waiting(queue), redis.call('ZCARD', due), running, redis.call('ZCARD', failed),
  redis.call('ZCARD', broken), redis.call('GET', paused), trashed,
  serving, redis.call('HGETALL', counts), redis.call('SCARD', blocked),
  first_due and math.max(0, tonumber(first_due) - now) or -1, run_at and math.max(0, now - tonumber(run_at)) or -1}
redis.call('EXPIRE', counts, 2592000)
return reply
