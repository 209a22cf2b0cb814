#!lua flags=no-writes
-- A task item is a payload, or this marker and the id of a job whose record holds the payload.
local MARKER = '\0worqr\0'

-- The id of the job that `item` refers to; nil for a payload.
local function job_id(item)
  if string.sub(item, 1, 7) == MARKER then
    return string.sub(item, 8)
  end
  return nil
end

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

-- list_tasks: payloads that wait, newest first, or from the front in the order in which they will be taken.
-- KEYS[1] queue LIST
-- KEYS[2] suspects LIST
-- ARGV[1] limit tasks
-- ARGV[2] from_front 1: the next to be taken first, 0: the newest first
-- ARGV[3] max_bytes bytes of payload after which no further task is listed
-- ARGV[4] max_skipped references to nothing that are skipped at most
-- RETURNS ok waiting task...
-- RESEND safe: it only reads
-- USES reference counts
local queue, suspects = KEYS[1], KEYS[2]
local limit, from_front = tonumber(ARGV[1]), ARGV[2] == '1'
local max_bytes, max_skipped = tonumber(ARGV[3]), tonumber(ARGV[4])

local reply = {'ok', count_waiting(queue)}
local bytes, skipped, listed = 0, 0, {}

local function list(key)
  local length, i = redis.call('LLEN', key), 0
  while i < length and #reply - 2 < limit and bytes < max_bytes and skipped < max_skipped do
    local item = redis.call('LINDEX', key, from_front and -1 - i or i)
    local id = job_id(item)
    local task = item
    if id then
      local kept = redis.call('HMGET', queue .. ':job:' .. id, 'task', 'state')
      task = kept[2] == 'waiting' and not listed[id] and kept[1] -- one that was due in between has two places in line
    end
    if task then
      reply[#reply + 1] = task
      bytes, listed[id or ''] = bytes + #task, id
    else
      skipped = skipped + 1
    end
    i = i + 1
  end
end

list(from_front and suspects or queue)
list(from_front and queue or suspects)
return reply
