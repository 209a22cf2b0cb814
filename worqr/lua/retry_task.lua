#!lua flags=allow-oom
-- retry_task: ends a claim whose run failed: the task goes to the back of the queue as a job that counts its failures;
-- at the limit it is set aside as failed.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] claims SET
-- ARGV[1] worker id
-- ARGV[2] claim id
-- ARGV[3] counted 1: costs one of the failures, 0: does not
-- ARGV[4] max_failures failures, the last of which is final
-- ARGV[5] keep_failed records, 0: none
-- ARGV[6] error_type text
-- ARGV[7] error_message text
-- ARGV[8] error_traceback text
-- RETURNS given | aside | cancelled | dropped (the queue was deleted) | gone | mine | lost
-- RESEND safe: fenced by the claim
-- USES give_back serving types wake
local queue, workers, claims = KEYS[1], KEYS[2], KEYS[3]
local worker, claim, counted = ARGV[1], ARGV[2], ARGV[3] == '1'
local max_failures, keep_failed = tonumber(ARGV[4]), ARGV[5]
local error_type, error_message, error_traceback = ARGV[6], ARGV[7], ARGV[8]

check_types(queue)
if redis.call('SREM', claims, claim) == 0 then
  return {why_not_held(workers, worker)}
end
local word = give_back(queue, claim, {
  counter = counted and 'failures' or '', limit = max_failures, back = true, kind = 'failed', reason = 'failed',
  keep = keep_failed, worker = worker, error_type = error_type, error_message = error_message,
  error_traceback = error_traceback,
})
if word == 'given' then
  tally(queue, 'retried', 1)
  wake(queue, 1)
end
wake_for_suspects(queue)
return {word}
