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
-- ARGV[8..] facts names and values: then and otherwise (base of the queue), on_failed (cancel), meta (JSON); and for a follow-up in this
--   queue then_options and otherwise_options (msgpack map), then_task and otherwise_task (bytes): another one holds its own, see
--   hold_follow_ups
-- RETURNS ok | exists | closed (the part of the parent: open it again) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local queue, batch, batches = KEYS[2], KEYS[3], KEYS[4]
local id, token, open_for, keep, parent = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]

-- What the facts may be, each as an option of a dispatch, see _dispatch.lua.
local FACTS = {['then'] = 'line', then_options = 'packed', then_task = 'string', otherwise = 'line',
  otherwise_options = 'packed', otherwise_task = 'string', on_failed = ' cancel ', meta = 'meta'}

-- True if the fact `name` may have this value.
local function is_fact(name, value)
  local kind = FACTS[name]
  if kind == 'packed' then
    return follow_up_options(value) ~= nil
  end
  return kind and value and (kind == 'line' and is_line(value) or valid_option(kind, value))
end

check_types(queue)
redis.call('ZCARD', batches)
if not (is_line(id) and is_random(token) and is_digits(open_for) and is_digits(keep)) then
  return redis.error_reply('ERR the id, the token, open_for and keep of a batch cannot be that')
end
local now = now_ms()
local fields = {id = id, token = token, state = 'open', made_at = digits(now), open_for = open_for,
  open_until = digits(now + tonumber(open_for)), keep = keep}
for i = 8, #ARGV, 2 do
  local fact, value = ARGV[i], ARGV[i + 1]
  if not is_fact(fact, value) then
    return redis.error_reply('ERR the fact ' .. fact .. ' of a batch cannot be that')
  end
  fields[fact] = value
end
for _, kind in ipairs({'then', 'otherwise'}) do
  local is_here = fields[kind] == queue
  if is_here ~= (fields[kind .. '_options'] ~= nil) or is_here ~= (fields[kind .. '_task'] ~= nil) then
    return redis.error_reply('ERR the follow-up ' .. kind
      .. ' of a batch needs options and a task, and one of another queue has none here')
  end
end
if redis.call('HLEN', batch) > 0 then
  return {'exists'}
end
local outer = parent ~= '' and cmsgpack.unpack(parent)
if outer and not is_batch(outer) then
  return redis.error_reply('ERR the parent of a batch cannot be that')
elseif outer and is_closed(queue, outer) then
  return {'closed'}
end
fields.parent = outer and enter_batch(outer, NESTED .. id) or nil
write_hash(batch, fields)
check_batch_in(queue, id, tonumber(open_for), now)
post_keep(queue, token, {fields['then'] or false, fields.otherwise}, 0)
wake(queue, count_members(queue))
return {'ok'}
