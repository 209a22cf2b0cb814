#!lua
-- fire_schedule: enqueues one firing of a schedule as the job cron:NAME, once, however often it is called. Firings come in
-- the order of their nominal times: a firing older than the last one is skipped. A last firing more than a minute ahead of
-- the clock was fired while the clock was wrong. It blocks no later firing, and its job, if it did not begin, is replaced.
-- A retry whose delay was counted from such a time does not block the schedule either: it is due now.
-- KEYS[1] queue LIST
-- KEYS[2] fired HASH
-- ARGV[1] name of the schedule
-- ARGV[2] nominal ms
-- ARGV[3] judged_at ms, the registry's clock when the leader found it due (the queue may lie on another server)
-- ARGV[4] run_at ms
-- ARGV[5] overlap when the job of an earlier firing is still there: skip, queue, or cancel (one that does not run is replaced)
-- ARGV[6] expire_s s that the last firings of the queue's schedules are remembered
-- ARGV[7] task bytes
-- ARGV[8] meta of the job, as JSON; empty for none
-- RETURNS ok | skipped (an earlier firing waits or runs) | busy (the same; nothing was done, try again) | fired (a later firing
--   was judged before) | again (this firing was enqueued before, with another meta)
-- RESEND safe: fenced by the nominal time; an equal one gets the same answer again, and nothing happens
local queue, fired = KEYS[1], KEYS[2]
local name, nominal, judged_at, run_at = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local overlap, expire_s, task, meta = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
meta = meta ~= '' and meta or nil
local mark = meta and ' ' .. redis.sha1hex(meta) or '' -- whose job it is, for two leaders that trace the same firing

local last, status, marked = string.match(redis.call('HGET', fired, name) or '', '^(%d+) (%a+)( ?%x*)$')
last = tonumber(last)
if last == nominal then
  return {status == 'ok' and marked ~= mark and 'again' or status}
elseif last and nominal < last and last <= judged_at + AHEAD_MS then
  return {'fired'}
end
check_types(queue)
local id = 'cron:' .. name
local seen = find_job(queue, id)
local job, now = queue .. ':job:' .. id, now_ms()
local kept = seen.job and redis.call('HMGET', job, 'scheduled_for', 'retried_at') or {}
local nominal_before, retried_at = whole_number(kept[1], 0), whole_number(kept[2], 0)
local earlier = seen.active or seen.job and nominal_before <= judged_at + AHEAD_MS
if earlier and overlap ~= 'cancel' and seen.job and seen.job.state == 'due' and retried_at > now + AHEAD_MS then
  redis.call('ZREM', queue .. ':due', id)
  redis.call('HSET', job, 'run_at', digits(now))
  wake(queue, enqueue_job(queue, id, now, now))
end
if earlier and overlap == 'queue' then
  return {'busy'}
end
status = 'ok'
if earlier and overlap == 'skip' then
  status = 'skipped'
else
  if seen.active then
    cancel_running(queue, id, 'the next firing of its schedule came')
  end
  local number = next_token(queue)
  store_token(queue, number)
  local o = {id = id, run_at = math.min(run_at, LATEST), scheduled_for = digits(nominal), meta = meta}
  local _, _, _, ready, more = upsert(queue, o, task, digits(number), now, seen)
  redis.call('EXPIRE', queue .. ':counts', COUNTS_EXPIRE)
  count(queue, 'enqueued', more, {id})
  wake(queue, ready + count_members(queue))
end
redis.call('HSET', fired, name, digits(nominal) .. ' ' .. status .. (status == 'ok' and mark or ''))
redis.call('EXPIRE', fired, expire_s)
return {status}
