#!lua flags=allow-oom
-- cancel_batch: cancels a batch that has not ended. It takes no jobs any more, and its parts get messages.
-- KEYS[1] queue LIST
-- KEYS[2] batch HASH
-- KEYS[3] batches ZSET
-- ARGV[1] id of the batch
-- ARGV[2] token of the batch; empty: of any
-- ARGV[3] reason text for callers that wait for a result
-- RETURNS ok | ended | unknown
-- RESEND safe: a copy finds the batch cancelled
local queue, batch, batches = KEYS[1], KEYS[2], KEYS[3]
local id, token, reason = ARGV[1], ARGV[2], ARGV[3]

check_types(queue)
redis.call('ZCARD', batches)
redis.call('HLEN', batch .. ':parts')
local kept = redis.call('HMGET', batch, 'token', 'state', 'cancel_reason')
if not kept[1] or token ~= '' and kept[1] ~= token then
  return {'unknown'}
elseif kept[2] == 'ended' then
  return {'ended'}
end
if not kept[3] then
  wake(queue, abandon_batch(queue, id, reason, now_ms()) + count_members(queue))
end
return {'ok'}
