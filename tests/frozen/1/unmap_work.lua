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

-- unmap_work: notes that a worker serves a queue no more; after the queue's stop_work or fail_worker said ok.
-- KEYS[1] producer HASH
-- KEYS[2] work_map SET
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] queue name
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not unmap what was mapped again
-- USES producer
local producer, work_map = KEYS[1], KEYS[2]
local number, lowest, queue = ARGV[1], ARGV[2], ARGV[3]

local before = replied(producer, number)
if before then
  return before
end
redis.call('SREM', work_map, queue)
return remember(producer, number, lowest, {'ok'})
