#!lua flags=allow-oom
-- retry_task: ends a claim and retries its task: the task goes to the back of the queue, now or when it is due. It becomes
-- a job with its counters. At the limit of the counter it goes to the dead-letter queue as failed.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] claims SET
-- ARGV[1] worker id
-- ARGV[2] claim id
-- ARGV[3] counter failures, stalls (its process died), timeouts, or empty: none is counted
-- ARGV[4] limit of that counter, for a job that has none of its own; the task fails when it is reached
-- ARGV[5] delay ms until it is due, - if run_at says
-- ARGV[6] run_at ms since 1970 when it is due, - if delay says
-- ARGV[7] error_type text
-- ARGV[8] error_message text
-- ARGV[9] error_traceback text
-- ARGV[10] error_fields JSON, empty: none
-- ARGV[11] pause ms for which the queue, or the lane of the task, is paused, with the error as the reason; the task goes to the front, uncounted; - for none
-- RETURNS given | aside | cancelled | dropped (the queue was deleted) | gone | mine | lost
-- RESEND safe: fenced by the claim
local queue, workers, claims = KEYS[1], KEYS[2], KEYS[3]
local worker, claim, counter, limit = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local delay, run_at = tonumber(ARGV[5]), tonumber(ARGV[6])
local error_type, error_message, error_traceback, error_fields = ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local pause = tonumber(ARGV[11])

check_types(queue)
check_dead_letter_types(queue, worker)
if redis.call('SREM', claims, claim) == 0 then
  return {unheld_status(workers, worker)}
end
local policy, now = worker_policy(queue, worker), now_ms()
local reason = ({stalls = 'stalled', timeouts = 'timeout'})[counter] or 'failed'
local failure = dead_letter_as('failed', reason, error_type, error_message, error_traceback, error_fields)
local due_at, retried_at = run_at and math.min(run_at, LATEST), nil
if not run_at then
  due_at, retried_at = delay > 0 and math.min(now + delay, LATEST) or nil, digits(now)
end
local release = release_as(counter, limit, failure, nil, true, due_at, retried_at)
if pause then
  release = release_as('')
  local lane = redis.call('HGET', queue .. ':lanes:claims', claim)
  if lane then
    pause_lane_for(queue, lane, error_message, pause, now)
  elseif pause_for(queue, error_message, pause) then
    count(queue, 'paused', 1)
  end
end
local status, ready, id = release_claim(queue, claim, release, policy, now)
if counter == 'timeouts' and (status == 'given' or status == 'aside') then
  tally(queue, 'timed_out', 1)
end
if status == 'given' then
  count(queue, counter == 'stalls' and 'stalled' or 'retried', 1, {id})
end
wake(queue, math.max(ready + count_members(queue), free_room(queue, {claim})))
wake_for_suspects(queue)
return {status}
