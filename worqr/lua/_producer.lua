-- Requests carry (producer, number), so that a copy that comes again, or late, changes nothing. Replies are words and whole
-- numbers; they are kept as text, one field per number, until the producer says that it needs them no more.
local REPLIES_EXPIRE = 3600

-- The reply to a request seen before, {'late'} for one the producer gave up or has the answer of, nil for a new one.
local function replied(producer, number)
  local kept = redis.call('HMGET', producer, number, 'low')
  if kept[1] then
    redis.call('EXPIRE', producer, REPLIES_EXPIRE)
    local reply = {}
    for part in string.gmatch(kept[1], '%S+') do
      reply[#reply + 1] = tonumber(part) or part
    end
    return reply
  end
  if tonumber(number) < (tonumber(kept[2]) or 0) then
    return {'late'}
  end
  return nil
end

-- Keeps `reply` under `number` and forgets the replies below `lowest`, at most 1000 of them at a time.
local function remember(producer, number, lowest, reply)
  local target = tonumber(lowest)
  local low = tonumber(redis.call('HGET', producer, 'low')) or target
  local above = math.min(target, low + 1000)
  if low < above then
    local gone = {}
    for n = low, above - 1 do
      gone[#gone + 1] = string.format('%.0f', n)
    end
    redis.call('HDEL', producer, unpack(gone))
  end
  local parts = {}
  for i, part in ipairs(reply) do
    parts[i] = type(part) == 'number' and string.format('%.0f', part) or part
  end
  redis.call('HSET', producer, number, table.concat(parts, ' '), 'low', string.format('%.0f', math.max(low, above)))
  redis.call('EXPIRE', producer, REPLIES_EXPIRE)
  return reply
end
