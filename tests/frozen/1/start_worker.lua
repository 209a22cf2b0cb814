#!lua flags=allow-oom
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

-- start_worker: registers a worker; refuses a mesh of another wire version.
-- KEYS[1] producer HASH
-- KEYS[2] registered SET
-- KEYS[3] worker_key STRING
-- KEYS[4] version STRING
-- KEYS[5] info HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] worker id
-- ARGV[4] keepalive_ms ms until the worker counts as dead, 0: never
-- ARGV[5] wire_version whole number
-- ARGV[6] info_expire_s s
-- ARGV[7..] facts names and values in turn, for people
-- RETURNS ok | version found | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not register a worker that left. A refusal
--   changes nothing
-- USES producer
local producer, registered, worker_key, version, info = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local number, lowest, worker, keepalive_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local wire_version, info_expire_s = ARGV[5], ARGV[6]

local before = replied(producer, number)
if before then
  return before
end
local found = redis.call('GET', version)
if found and found ~= wire_version then
  return {'version', found}
end
redis.call('SCARD', registered)
redis.call('HLEN', info)
if not found then
  redis.call('SET', version, wire_version)
end
redis.call('SADD', registered, worker)
if keepalive_ms > 0 then
  redis.call('SET', worker_key, 'RUN 0', 'PX', keepalive_ms)
else
  redis.call('SET', worker_key, 'STAY')
end
for i = 7, #ARGV, 2 do
  local fact, value = ARGV[i], ARGV[i + 1]
  redis.call('HSET', info, fact, value)
end
redis.call('EXPIRE', info, info_expire_s)
return remember(producer, number, lowest, {'ok'})
