#!lua flags=allow-oom
-- save_state: stores what a run keeps for later runs of its job: bytes, or the result of a step. A raw task that saves becomes
-- a job.
-- KEYS[1] queue LIST
-- KEYS[2] claims SET
-- ARGV[1] worker id
-- ARGV[2] claim id
-- ARGV[3] number of the save, higher than that of the save before it; 0 for a step
-- ARGV[4] step its name; empty: bytes are saved
-- ARGV[5] value the bytes, or the kind of the step's result, a space and its value
-- RETURNS ok size | full size | lost: size is how many bytes the job keeps, or would keep
-- RESEND safe: fenced by the claim; a number that is not higher than the stored one changes nothing, and a step is stored once
local queue, claims = KEYS[1], KEYS[2]
local worker, claim, number, step, value = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]

local held = redis.call('SISMEMBER', claims, claim) == 1
local item = held and own(redis.pcall('LINDEX', queue .. ':claim:' .. claim, 0))
if not item then
  return {'lost'}
end
local id, field = job_id(item), step == '' and 'saved' or 'step:' .. step
local task = claimed_task(queue, item, id, claim, {task = item})
local active = queue .. ':active:' .. task.id
local size, before = 0, 0
if id then
  local kept = own(redis.pcall('HMGET', active, 'claim', 'saved_size', 'saved_number')) or {}
  if kept[1] ~= claim then
    return {'lost'}
  end
  size, before = whole_number(kept[2], 0, MOST_KEPT), redis.call('HSTRLEN', active, field)
  if step == '' and number <= whole_number(kept[3], 0) or step ~= '' and before > 0 then
    return {'ok', size}
  end
end
size = size + saved_bytes(step, #value) - before
if size > MOST_KEPT or step == '' and #value > MOST_SAVED then
  return {'full', size}
end
if not id then
  become_job(queue, worker, claim, task)
end
redis.call('HSET', active, field, value, 'saved_size', size)
if step == '' then
  redis.call('HSET', active, 'saved_number', digits(number))
end
return {'ok', size}
