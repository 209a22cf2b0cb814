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

-- The fence is a hash: worker -> number, first claim, count and suspect of its last start request. A worker whose claims are
-- given back in several steps stands there as leaving until the last: it gets nothing, but whoever looks for claims finds them.
local LEAVING = 'leaving'

-- What the fence holds of `worker`; nil if it stands outside, or leaves.
local function place_in_fence(workers, worker)
  local place = redis.call('HGET', workers, worker)
  if place and place ~= LEAVING then
    return place
  end
  return nil
end

-- Why a claim is not among those of `worker`: it settled it before (a resend), or it was swept.
local function why_not_held(workers, worker)
  return place_in_fence(workers, worker) and 'mine' or 'lost'
end

-- start_work: puts a worker into the fence of a queue, with what a sweep must know of its handler.
-- KEYS[1] producer HASH
-- KEYS[2] workers HASH
-- KEYS[3] policy HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] worker id
-- ARGV[4] max_stalls deaths, the last of which is final
-- ARGV[5] keep_failed records, 0: none
-- ARGV[6] on_failure 1: a failure handler is registered
-- ARGV[7] result_ttl ms that results are kept, - if they are not
-- ARGV[8] last number of a start request that the worker sent to this queue before
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not put a worker back that left
-- USES producer serving
local producer, workers, policy = KEYS[1], KEYS[2], KEYS[3]
local number, lowest, worker, max_stalls = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local keep_failed, on_failure, result_ttl, last = ARGV[5], ARGV[6], ARGV[7], ARGV[8]

local before = replied(producer, number)
if before then
  return before
end
local place = place_in_fence(workers, worker)
redis.call('HSET', policy, 'max_stalls', max_stalls, 'keep_failed', keep_failed, 'on_failure', on_failure)
if result_ttl == '-' then
  redis.call('HDEL', policy, 'result_ttl')
else
  redis.call('HSET', policy, 'result_ttl', result_ttl)
end
if not place then
  redis.call('HSET', workers, worker, last .. ' 0 0 0')
end
return remember(producer, number, lowest, {'ok'})
