#!lua
-- open_batch: stores the record of a batch, to which its producer may add jobs then.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] batch HASH
-- KEYS[4] batches ZSET
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] id of the batch
-- ARGV[4] token
-- ARGV[5] open_for ms without an addition after which the leader cancels it
-- ARGV[6] keep ms for which the record is stored after the end
-- ARGV[7] parent the option batch of a dispatch (msgpack), if it is a member of another batch; else empty
-- ARGV[8..] facts names and values: then and otherwise (base of the queue), then_options and otherwise_options (msgpack map),
--   then_task and otherwise_task (bytes), on_failed (cancel), meta (JSON)
-- RETURNS ok | exists | closed (the part of the parent: open it again) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local queue, batch, batches = KEYS[2], KEYS[3], KEYS[4]
local id, token, open_for, keep, parent = ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6], ARGV[7]

check_types(queue)
redis.call('ZCARD', batches)
if redis.call('HLEN', batch) > 0 then
  return {'exists'}
end
local outer = parent ~= '' and cmsgpack.unpack(parent)
if outer and is_closed(queue, outer) then
  return {'closed'}
end
local now = now_ms()
local fields = {id = id, token = token, state = 'open', made_at = digits(now), open_for = digits(open_for),
  open_until = digits(now + open_for), keep = keep, parent = outer and enter_batch(outer, NESTED .. id) or nil}
for i = 8, #ARGV, 2 do
  local fact, value = ARGV[i], ARGV[i + 1]
  fields[fact] = value
end
write_hash(batch, fields)
check_batch_in(queue, id, open_for, now)
wake(queue, count_members(queue))
return {'ok'}
