-- The one way back into the queue, for stop, retry, leave and the recovery of dead workers. `how`: counter ('' = free,
-- failures, stalls, timeouts), limit (the job's own, or a default, of that counter), max_stalls, back (true: to the back),
-- run_at (ms, nil: at once), retried_at (ms as text, nil: run_at is no delay), now, ttl, and the fields for set_aside. A claim
-- with a cancel mark ends as cancelled; a claim of a queue that was cleared since is dropped. Returns given, cancelled,
-- dropped, aside or gone, how many tasks became claimable, and the id of a job that was given back. The caller removes the
-- claim from the worker's set of claims.
local function give_back(base, claim, how)
  local record = read_claim(base, claim)
  if take_mark(base, claim) then
    tally(base, 'cancelled', 1, {record and record.job})
    return 'cancelled', end_claim(base, claim, {outcome = 'cancelled', ttl = how.ttl, now = how.now}) or 0
  end
  if not record then
    return 'gone', end_claim(base, claim, {outcome = 'gone', now = how.now}) or 0
  end
  if tonumber(claim) <= (tonumber(redis.call('HGET', base .. ':counts', 'cleared')) or 0) then
    tally(base, 'dropped', 1, {record.job})
    return 'dropped', end_claim(base, claim, {outcome = 'cancelled', ttl = how.ttl, now = how.now}) or 0
  end
  if how.counter ~= '' then
    record[how.counter] = record[how.counter] + 1
    if record[how.counter] >= (tonumber(record.fields['max_' .. how.counter]) or how.limit) then
      return 'aside', set_aside(base, claim, record, how)
    end
  end
  return 'given', wait_again(base, claim, record, how, how.now)
end
