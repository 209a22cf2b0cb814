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

-- A fence number as text; a plain tostring would print 1.7e+15.
local function digits(number)
  return string.format('%.0f', number)
end

-- The queue's next fence number: above the last one, and above the clock, so that it never regresses.
local function next_fence(base)
  local last = tonumber(redis.call('HGET', base .. ':counts', 'fence')) or 0
  local time = redis.call('TIME')
  return math.max(last + 1, time[1] * 1000000 + time[2])
end

-- Notes the last fence number that was given out. A tally follows, which sees to it that the counters expire.
local function note_fence(base, number)
  redis.call('HSET', base .. ':counts', 'fence', digits(number))
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

-- declare_schedules: notes schedules of a peer and that they were seen just now. A new or changed one counts its firings from
-- now on; one that is as it was goes on where it stood, so that what was missed while no peer lived can be made up for.
-- KEYS[1] producer HASH
-- KEYS[2] schedules HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] replace 1: change what another peer declared, 0: only say that they are still meant
-- ARGV[4] expire_s s until all schedules of a mesh without peers are forgotten
-- ARGV[5..] names and definitions in turn
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not replace what a newer peer declared
-- USES counts fence producer
local producer, schedules = KEYS[1], KEYS[2]
local number, lowest, replace, expire_s = ARGV[1], ARGV[2], ARGV[3] == '1', ARGV[4]

local before = replied(producer, number)
if before then
  return before
end
redis.call('HLEN', schedules)
local now = digits(now_ms())
for i = 5, #ARGV, 2 do
  local name, value = ARGV[i], ARGV[i + 1]
  local found = redis.call('HGET', schedules, 'def ' .. name)
  if not found or replace and found ~= value then
    redis.call('HSET', schedules, 'def ' .. name, value, 'last ' .. name, now)
    redis.call('HDEL', schedules, 'next ' .. name, 'owed ' .. name)
  end
  redis.call('HSET', schedules, 'seen ' .. name, now)
end
redis.call('EXPIRE', schedules, expire_s)
return remember(producer, number, lowest, {'ok'})
