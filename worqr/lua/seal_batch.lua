#!lua flags=allow-oom
-- seal_batch: its producer adds nothing more to a batch. If no part is open, the batch ends.
-- KEYS[1] queue LIST
-- KEYS[2] batch HASH
-- KEYS[3] batches ZSET
-- ARGV[1] id of the batch
-- ARGV[2] token of the batch
-- RETURNS ok state keep [part version]...: the open parts, which are to be told | unknown
-- RESEND safe: a copy finds the batch sealed
local queue, batch, batches = KEYS[1], KEYS[2], KEYS[3]
local id, token = ARGV[1], ARGV[2]

check_types(queue)
redis.call('ZCARD', batches)
redis.call('HLEN', batch .. ':parts')
local kept = redis.call('HMGET', batch, 'token', 'state', 'keep')
if kept[1] ~= token then
  return {'unknown'}
end
local now = now_ms()
if kept[2] == 'open' then
  redis.call('HSET', batch, 'state', 'sealed', 'sealed_at', digits(now))
  check_batch_in(queue, id, FIRST_CHECK, now)
  notify_batch(queue, id, 'sealed')
  wake(queue, end_if_complete(queue, id, now) + count_members(queue))
end
local reply = {'ok', redis.call('HGET', batch, 'state'), kept[3]}
for _, part in ipairs(parts_of(batch)) do
  if part.open then
    reply[#reply + 1], reply[#reply + 2] = part.base, digits(part.v)
  end
end
return reply
