#!lua flags=allow-oom
-- close_part: its producer adds nothing more to a batch. The part closes if no member is left, and reports that, also if it had closed
-- before. A part that was opened and got no member is stored as closed, so that a late dispatch is refused.
-- KEYS[1] queue LIST
-- KEYS[2] part HASH
-- ARGV[1] token of the batch
-- ARGV[2] version of the part
-- ARGV[3] home base of its queue
-- ARGV[4] id of the batch
-- ARGV[5] keep ms
-- RETURNS ok
-- RESEND safe: a copy reports the same again
local queue, part = KEYS[1], KEYS[2]
local token, version, home, id, keep = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local told = {token = token, number = version, home = home, id = id, keep = keep, sealed = true}

check_types(queue)
if not is_batch(told) then
  return redis.error_reply('ERR the token, the version, the home, the id and keep of a batch cannot be that')
end
redis.call('HLEN', part)
redis.call('SCARD', part .. ':members')
open_part(part, told)
drop_lost_members(queue, token, batch_field(token, home, id))
local ready
if redis.call('HEXISTS', part, 'closed') == 1 then
  expire_part(part)
  ready = send_report(queue, token)
else
  ready = settle_part(queue, token)
end
wake(queue, ready + count_members(queue))
return {'ok'}
