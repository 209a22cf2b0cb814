-- The stored replies of a producer, by which a repeated or late copy of a request changes nothing.
-- Requests carry (producer, number). Replies are stored unchanged, one field per number, until the producer no longer
-- needs them. The field 'low' is the lowest number that it may still send. No reply is kept below 'oldest', which follows
-- in steps.

local REPLIES_EXPIRE = 3600
local EXACT = 9007199254740991 -- above it, a number plus 1 may be the same number, and no loop over such numbers ends

-- Returns the reply to a request seen before. Returns {'late'} for one that the producer abandoned or has the reply of.
-- Returns for a new one: nil, and the stored 'low' and 'oldest'.
local function replied(producer, number, lowest)
  assert(whole_number(number, nil, EXACT) and whole_number(lowest, nil, EXACT),
    'the number of a request and the lowest unanswered one must be whole numbers below 2^53')
  local kept = redis.call('HMGET', producer, number, 'low', 'oldest')
  local low = whole_number(kept[2], 0, EXACT)
  if tonumber(number) < low then
    return {'late'}
  end
  if kept[1] then
    redis.call('EXPIRE', producer, REPLIES_EXPIRE)
    local is_read, reply = pcall(cmsgpack.unpack, kept[1])
    return is_read and type(reply) == 'table' and reply or redis.error_reply('ERR the stored reply to this request cannot be read')
  end
  return nil, low, whole_number(kept[3], nil, EXACT)
end

-- Stores `reply` under `number`, and deletes the replies below `lowest`, at most 1000 at a time. `low` and `oldest` are
-- from replied.
local function remember(producer, number, lowest, reply, low, oldest)
  low = math.max(tonumber(lowest), low)
  if not (oldest and oldest <= low) then -- none is stored yet, or another program wrote it
    oldest = low
  end
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

-- Runs a script whose header says NUMBERED: the loader puts its body into `transaction`. Its reply is stored, a refusal
-- too. An error is not stored, because it wrote nothing: the same number may come again and take effect then.
local function numbered(producer, number, lowest, transaction)
  local before, low, oldest = replied(producer, number, lowest)
  if before then
    return before
  end
  local reply = transaction()
  return reply.err and reply or remember(producer, number, lowest, reply, low, oldest)
end
