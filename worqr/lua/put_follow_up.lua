#!lua flags=allow-oom
-- put_follow_up: stores the follow-up of a batch whose home is another queue as a job of this one, once for each ending.
-- KEYS[1] queue LIST
-- KEYS[2] part HASH
-- ARGV[1] ending its number
-- ARGV[2] options of the job (msgpack)
-- ARGV[3] task
-- ARGV[4] kept_for ms for which the number of the ending is stored
-- RETURNS ok | stored (before)
-- RESEND safe: fenced by the number of the ending
local queue, part = KEYS[1], KEYS[2]
local ending, options, task, kept_for = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

check_types(queue)
if redis.call('HSETNX', part, 'follow_up ' .. ending, '1') == 0 then
  return {'stored'}
end
if redis.call('HEXISTS', part, 'v') == 0 then
  redis.call('PEXPIRE', part, kept_for)
end
wake(queue, store_follow_up(queue, follow_up_options(options), task) + count_members(queue))
return {'ok'}
