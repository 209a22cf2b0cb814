#!lua flags=allow-oom
-- fail_task: ends a claim for good: its task is set aside as failed (capped) or broken (kept until somebody deals with it).
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] claims SET
-- ARGV[1] worker id
-- ARGV[2] claim id
-- ARGV[3] kind failed or broken
-- ARGV[4] keep_failed records, 0: none
-- ARGV[5] error_type text
-- ARGV[6] error_message text
-- ARGV[7] error_traceback text
-- RETURNS aside | cancelled | gone | mine | lost
-- RESEND safe: fenced by the claim
-- USES end_claim record serving set_aside types wake
local queue, workers, claims = KEYS[1], KEYS[2], KEYS[3]
local worker, claim, kind, keep_failed = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local error_type, error_message, error_traceback = ARGV[5], ARGV[6], ARGV[7]

check_types(queue)
if redis.call('SREM', claims, claim) == 0 then
  return {why_not_held(workers, worker)}
end
local record = read_claim(queue, claim)
local word = 'gone'
if take_mark(queue, claim) then
  end_claim(queue, claim)
  word = 'cancelled'
elseif record then
  if kind == 'failed' then
    record.failures = record.failures + 1
  end
  set_aside(queue, claim, record, {
    kind = kind, reason = kind, keep = keep_failed, worker = worker, error_type = error_type,
    error_message = error_message, error_traceback = error_traceback,
  })
  word = 'aside'
else
  end_claim(queue, claim)
end
wake_for_suspects(queue)
return {word}
