#!lua
-- open_part: opens a part of a batch, so that jobs of its queue can be added. A part that is open keeps its version. To a sealed
-- batch, only running jobs of it add more.
-- KEYS[1] queue LIST
-- KEYS[2] batch HASH
-- KEYS[3] parts HASH
-- KEYS[4] batches ZSET
-- ARGV[1] id of the batch
-- ARGV[2] token of the batch; empty: of any
-- ARGV[3] part base of its queue
-- ARGV[4] max_parts
-- ARGV[5] inside 1: a running job of the batch adds jobs
-- RETURNS ok version sealed token keep on_failed | cancelled reason | sealed | ended | unknown | full; in ok, sealed is 1 if its
--   producer adds nothing more
-- RESEND safe: a copy finds the part open
local queue, batch, parts, batches = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, token, part, max_parts, inside = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1'

redis.call('ZCARD', batches)
local kept = redis.call('HMGET', batch, 'token', 'state', 'cancel_reason', 'open_for', 'keep', 'on_failed')
local v, open, counts = known_part(redis.call('HGET', parts, part))
if not kept[1] or token ~= '' and kept[1] ~= token then
  return {'unknown'}
elseif kept[3] then
  return {'cancelled', kept[3]}
elseif kept[2] == 'ended' then
  return {'ended'}
elseif kept[2] == 'sealed' and not inside then
  return {'sealed'}
end
if v == 0 and redis.call('HLEN', parts) >= max_parts then
  return {'full'}
elseif not open then
  add_to(batch, 'open', 1)
  v = v + 1
  redis.call('HSET', parts, part, digits(v) .. ' 1 ' .. counts)
end
local now, sealed = now_ms(), kept[2] == 'sealed'
if not sealed then
  local open_for = whole_number(kept[4], 3600000)
  redis.call('HSET', batch, 'open_until', digits(now + open_for))
  check_batch_in(queue, id, open_for, now)
end
return {'ok', digits(v), sealed and 1 or 0, kept[1], kept[5], kept[6] or ''}
