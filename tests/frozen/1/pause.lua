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

-- Requests carry (producer, number), so that a copy that comes again, or late, changes nothing. Replies are kept as they are,
-- one field per number, until the producer says that it needs them no more: 'low' is the lowest number it may still send, and
-- no reply is kept below 'oldest', which follows in steps.
local REPLIES_EXPIRE = 3600
local low, oldest

-- The reply to a request seen before, {'late'} for one the producer gave up or has the answer of, nil for a new one.
local function replied(producer, number)
  local kept = redis.call('HMGET', producer, number, 'low', 'oldest')
  low, oldest = tonumber(kept[2]) or 0, tonumber(kept[3])
  if tonumber(number) < low then
    return {'late'}
  end
  if kept[1] then
    redis.call('EXPIRE', producer, REPLIES_EXPIRE)
    return cmsgpack.unpack(kept[1])
  end
  return nil
end

-- Keeps `reply` under `number`, which replied() did not know, and forgets those below `lowest`, at most 1000 at a time.
local function remember(producer, number, lowest, reply)
  low = math.max(tonumber(lowest), low)
  oldest = oldest or low
  local above = math.min(low, oldest + 1000)
  local gone = {}
  for n = oldest, above - 1 do
    gone[#gone + 1] = string.format('%.0f', n)
  end
  if #gone > 0 then
    redis.call('HDEL', producer, unpack(gone))
  end
  redis.call('HSET', producer, number, cmsgpack.pack(reply),
    'low', string.format('%.0f', low), 'oldest', string.format('%.0f', math.max(oldest, above)))
  redis.call('EXPIRE', producer, REPLIES_EXPIRE)
  return reply
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

-- pause: claims on the queue stop; enqueueing goes on.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] paused STRING
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] reason text
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo a resume
-- USES counts producer types
local producer, queue, paused = KEYS[1], KEYS[2], KEYS[3]
local number, lowest, reason = ARGV[1], ARGV[2], ARGV[3]

local before = replied(producer, number)
if before then
  return before
end
check_types(queue)
redis.call('SET', paused, reason)
tally(queue, 'paused', 1)
return remember(producer, number, lowest, {'ok'})
