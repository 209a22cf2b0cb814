#!lua flags=allow-oom
-- cancel_part: cancels the members of a part, in steps, because its batch was cancelled. A part of a later version is left alone: a
-- member was put back since.
-- KEYS[1] queue LIST
-- KEYS[2] part HASH
-- KEYS[3] part_members SET
-- ARGV[1] token of the batch
-- ARGV[2] version of the part
-- ARGV[3] home base of its queue
-- ARGV[4] id of the batch
-- ARGV[5] keep ms
-- ARGV[6] reason text for callers that wait for a result
-- ARGV[7] cursor of SSCAN, 0 at first
-- ARGV[8] budget members to look at in one call
-- RETURNS ok | more cursor
-- RESEND safe: a copy cancels what is left
local queue, part, part_members = KEYS[1], KEYS[2], KEYS[3]
local token, version, home, id, keep = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local told = {token = token, number = version, home = home, id = id, keep = keep, sealed = true}
local reason, cursor, budget = ARGV[6], ARGV[7], ARGV[8]

check_types(queue)
if not is_batch(told) then
  return redis.error_reply('ERR the token, the version, the home, the id and keep of a batch cannot be that')
end
redis.call('SCARD', part_members)
redis.call('ZCARD', queue .. ':batches')
local holders = cursor == '0' and claim_holders(queue)
if (tonumber(redis.call('HGET', part, 'v')) or 0) > version then
  return {'ok'}
end
open_part(part, told)
redis.call('HSET', part, 'cancel_reason', reason)
drop_lost_members(queue, token, batch_field(token, home, id))
if holders then
  cancel_running_members(queue, holders, part_members, reason)
end
local found = redis.call('SSCAN', part_members, cursor, 'COUNT', budget)
local ready = cancel_members(queue, found[2], reason)
ready = ready + (redis.call('HEXISTS', part, 'closed') == 1 and send_report(queue, token) or settle_part(queue, token))
wake(queue, ready + count_members(queue))
give_room(queue)
if found[1] == '0' then
  return {'ok'}
end
return {'more', found[1]}
