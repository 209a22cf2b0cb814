#!lua flags=no-writes
-- read_payload: the whole payload of a job, of a running task, or of a dead-letter record.
-- KEYS[1] queue LIST
-- KEYS[2] job HASH
-- KEYS[3] active HASH
-- KEYS[4] dead_letter_index HASH
-- ARGV[1] id of the job; not used if there is a claim
-- ARGV[2] claim of a running task, or under which a task failed; empty: the id names the task
-- RETURNS ok task | gone
-- RESEND safe: it only reads
local queue, job, active, dead_letter_index = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, claim = ARGV[1], ARGV[2]

local task
if claim == '' then
  claim = own(redis.pcall('HGET', dead_letter_index, id))
  task = own(redis.pcall('HGET', active, 'task')) or own(redis.pcall('HGET', job, 'task'))
else
  local item = own(redis.pcall('LINDEX', queue .. ':claim:' .. claim, 0))
  local named = item and job_id(item)
  task = item
  if named then
    task = own(redis.pcall('HGET', queue .. ':active:' .. named, 'task'))
  end
end
if not task and claim then
  task = own(redis.pcall('HGET', queue .. ':aside:' .. claim, 'task'))
end
return task and {'ok', task} or {'gone'}
