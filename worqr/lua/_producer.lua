-- Requests carry (producer, number), so that a copy that comes again, or late, changes nothing. Replies are kept as they are,
-- one field per number, until the producer says that it needs them no more: 'low' is the lowest number it may still send, and
-- no reply is kept below 'oldest', which follows in steps.
local REPLIES_EXPIRE = 3600
local low, oldest

-- The reply to a request seen before, {'late'} for one the producer gave up or has the answer of, nil for a new one.
local function replied(producer, number, lowest)
  assert(tonumber(number) and tonumber(lowest), 'the number of a request and the lowest unanswered one must be numbers')
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

-- Runs a script whose header says NUMBERED: the loader puts its body into `transaction`. Whatever that returns is remembered,
-- refusals too; but not an error, which wrote nothing: the same number may come again and then have its effect.
local function numbered(producer, number, lowest, transaction)
  local before = replied(producer, number, lowest)
  if before then
    return before
  end
  local reply = transaction()
  return reply.err and reply or remember(producer, number, lowest, reply)
end
