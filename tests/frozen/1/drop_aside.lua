#!lua flags=allow-oom
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
-- A hash as a table, nil if it is empty.
local function read_hash(key)
  local flat = redis.call('HGETALL', key)
  if #flat == 0 then
    return nil
  end
  local fields = {}
  for i = 1, #flat, 2 do
    fields[flat[i]] = flat[i + 1]
  end
  return fields
end

-- Writes the table `fields` into the hash `key`.
local function write_hash(key, fields)
  local flat = {}
  for name, value in pairs(fields) do
    flat[#flat + 1] = name
    flat[#flat + 1] = value
  end
  redis.call('HSET', key, unpack(flat))
end

local function record_of(item, id, claim, fields)
  return {item = item, job = id, id = id or '@' .. claim, fields = fields, task = fields.task,
    failures = tonumber(fields.failures) or 0, stalls = tonumber(fields.stalls) or 0,
    timeouts = tonumber(fields.timeouts) or 0}
end

-- What is known of the task under `claim`, read before anything is written; nil if nothing lies there, or a reference to
-- nothing.
local function read_claim(base, claim)
  local item = redis.call('LINDEX', base .. ':claim:' .. claim, 0)
  if not item then
    return nil
  end
  local id = job_id(item)
  local fields = {task = item}
  if id then
    fields = read_hash(base .. ':active:' .. id)
  end
  return fields and fields.task and record_of(item, id, claim, fields) or nil
end

-- USES record
-- Sets the field `name` of the hash `key`, or takes it away where `value` is false.
local function set_field(key, name, value)
  if value then
    redis.call('HSET', key, name, value)
  else
    redis.call('HDEL', key, name)
  end
end

-- Forgets the record set aside under `claim`, and that its id was. Those of one id know the one before and the one after,
-- and the index knows the newest, so that each can go without a search.
local function forget_aside(base, claim)
  local aside = base .. ':aside:'
  local kept = redis.call('HMGET', aside .. claim, 'id', 'older', 'newer')
  local id, older, newer = kept[1], kept[2], kept[3]
  if older then
    set_field(aside .. older, 'newer', newer)
  end
  if newer then
    set_field(aside .. newer, 'older', older)
  elseif id then
    set_field(base .. ':aside', id, older)
  end
  redis.call('DEL', aside .. claim)
end

-- Writes the record set aside under `claim` and lists it, if it is to be kept; the oldest above the cap go.
local function list_aside(base, claim, record, facts, how)
  local aside, list, keep = base .. ':aside:' .. claim, base .. ':' .. how.kind, tonumber(how.keep)
  if how.kind == 'broken' or keep > 0 then
    if record.job then
      redis.call('RENAME', base .. ':active:' .. record.id, aside)
      redis.call('HDEL', aside, 'claim', 'state', 'queued', 'suspect', 'progress', 'message', 'cancel_reason')
    end
    facts.task, facts.older = record.task, redis.call('HGET', base .. ':aside', record.id) or nil
    if facts.older then
      redis.call('HSET', base .. ':aside:' .. facts.older, 'newer', claim)
    end
    write_hash(aside, facts)
    redis.call('HSET', base .. ':aside', record.id, claim)
    redis.call('ZADD', list, facts.at, claim)
  end
  if how.kind == 'failed' then
    local over = math.min(redis.call('ZCARD', list) - keep, 100)
    if over > 0 then
      local popped = redis.call('ZPOPMIN', list, over)
      for i = 1, #popped, 2 do
        forget_aside(base, popped[i])
      end
    end
  end
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

-- drop_aside: forgets what was set aside.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] list ZSET
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3..] dropped claims under which they were set aside
-- RETURNS ok dropped | late
-- RESEND safe: the reply is stored under the producer's number
-- USES aside producer types
local producer, queue, list = KEYS[1], KEYS[2], KEYS[3]
local number, lowest = ARGV[1], ARGV[2]

local before = replied(producer, number)
if before then
  return before
end
check_types(queue)
local count = 0
for i = 3, #ARGV do
  local dropped = ARGV[i]
  if redis.call('ZREM', list, dropped) == 1 then
    forget_aside(queue, dropped)
    count = count + 1
  end
end
return remember(producer, number, lowest, {'ok', count})
