#!lua flags=allow-oom
-- purge_queue: deletes one batch of the trash, with the records of its jobs. Callers that wait for one of them are notified of
-- the cancellation.
-- KEYS[1] queue LIST
-- KEYS[2] trash LIST
-- KEYS[3] trash_suspects LIST
-- KEYS[4] trash_due ZSET
-- KEYS[5] trash_blocked SET
-- KEYS[6] counts HASH
-- KEYS[7] trash_lanes ZSET
-- ARGV[1] limit plain tasks; a job counts as ten of them, because its record is deleted as well
-- RETURNS ok | more
-- RESEND safe: a copy purges the next step
local queue, trash, trash_suspects, trash_due, trash_blocked = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local counts, trash_lanes, limit = KEYS[6], KEYS[7], tonumber(ARGV[1])

local JOB = 10 -- the time that a job takes, in plain tasks

redis.call('LLEN', trash_suspects)
redis.call('ZCARD', trash_due)
redis.call('SCARD', trash_blocked)
redis.call('ZCARD', trash_lanes)
check_lane_types(queue)
local noted, ttl = redis.call('HMGET', counts, 'cleared', 'cleared_why'), longest_result_ttl(queue)
local cleared, why = whole_number(noted[1], math.huge, NEVER), noted[2] or ''
local function purge(id)
  local kept = own(redis.pcall('HMGET', queue .. ':job:' .. id, 'task', 'queued')) or {}
  if kept[1] and whole_number(kept[2], 0, NEVER) <= cleared then -- else a newer job of this id waits in the queue
    delete_trashed_job(queue, id, ttl, why)
  end
  limit = limit - JOB
end

local function purge_list(list)
  while limit > 0 and redis.call('EXISTS', list) == 1 do
    local id = job_id(redis.call('RPOP', list))
    if id then
      purge(id)
    else
      limit = limit - 1
    end
  end
end

purge_list(trash)
purge_list(trash_suspects)
while limit > 0 and redis.call('EXISTS', trash_lanes) == 1 do
  local lane, list = trashed_lane(queue, trash_lanes)
  limit = limit - 1
  if lane_length(list) == 0 then
    redis.call('ZREM', trash_lanes, lane)
  end
  purge_list(list)
end
drop_idle_lanes(queue)
if limit > 0 then
  local due = redis.call('ZPOPMIN', trash_due, math.ceil(limit / JOB))
  for i = 1, #due, 2 do
    purge(due[i])
  end
end
if limit > 0 then
  for _, id in ipairs(redis.call('SPOP', trash_blocked, math.ceil(limit / JOB))) do
    purge(id)
  end
end
wake(queue, count_members(queue))
return {redis.call('EXISTS', trash, trash_suspects, trash_due, trash_blocked, trash_lanes) > 0 and 'more' or 'ok'}
