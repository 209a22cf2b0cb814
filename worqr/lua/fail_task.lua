#!lua flags=allow-oom
-- fail_task: ends a claim for good: its task goes to the dead-letter queue as failed or broken. Failed ones are capped,
-- broken ones are kept until they are dropped or retried. The failure handler, if one is registered, gets its job.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] claims SET
-- ARGV[1] worker id
-- ARGV[2] claim id
-- ARGV[3] kind failed or broken
-- ARGV[4] error_type text
-- ARGV[5] error_message text
-- ARGV[6] error_traceback text
-- ARGV[7] error_fields JSON, empty: none
-- RETURNS aside | cancelled | gone | mine | lost
-- RESEND safe: fenced by the claim
local queue, workers, claims = KEYS[1], KEYS[2], KEYS[3]
local worker, claim, kind = ARGV[1], ARGV[2], ARGV[3]
local error_type, error_message, error_traceback, error_fields = ARGV[4], ARGV[5], ARGV[6], ARGV[7]

check_types(queue)
check_dead_letter_types(queue, worker)
if redis.call('SREM', claims, claim) == 0 then
  return {unheld_status(workers, worker)}
end
local task, policy, now = read_claim(queue, claim), worker_policy(queue, worker), now_ms()
local failure = dead_letter_as(kind, kind, error_type, error_message, error_traceback, error_fields)
local status, ready = 'cancelled', end_if_cancelled(queue, claim, task, policy.result_ttl, now)
if not ready and task then
  if kind == 'failed' then
    task.failures = task.failures + 1
  end
  status, ready = 'aside', move_to_dead_letters(queue, claim, task, failure, policy, now)
elseif not ready then
  status, ready = 'gone', end_claim(queue, claim, 'gone', nil, nil, now) or 0
end
wake(queue, math.max(ready + count_members(queue), free_room(queue, {claim})))
wake_for_suspects(queue)
return {status}
