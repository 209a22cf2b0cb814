#!lua flags=allow-oom
-- fail_task: ends a claim for good: its task goes to the dead-letter queue as failed (capped) or broken (kept until it is
-- dropped or retried), and the failure handler, if one is registered, gets its job.
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
local record, how = read_claim(queue, claim), worker_policy(queue, worker)
how.kind, how.reason, how.now = kind, kind, now_ms()
how.error_type, how.error_message, how.error_traceback = error_type, error_message, error_traceback
how.error_fields = error_fields ~= '' and error_fields or nil
local status, ready
if take_cancel_request(queue, claim) then
  count(queue, 'cancelled', 1, {record and record.job})
  status, ready = 'cancelled', end_claim(queue, claim, {outcome = 'cancelled', ttl = how.ttl, now = how.now}) or 0
elseif record then
  if kind == 'failed' then
    record.failures = record.failures + 1
  end
  status, ready = 'aside', move_to_dead_letters(queue, claim, record, how)
else
  status, ready = 'gone', end_claim(queue, claim, {outcome = 'gone', now = how.now}) or 0
end
wake(queue, ready)
wake_for_suspects(queue)
return {status}
