#!lua
-- note_progress: stores the progress and messages of running tasks. A raw task with progress becomes a job.
-- KEYS[1] queue LIST
-- KEYS[2] claims SET
-- ARGV[1] worker id
-- ARGV[2..] said claim id, progress (a number as text, empty: none) and message, in turn
-- RETURNS ok noted
-- RESEND safe: fenced by the claim; the same is noted again
local queue, claims = KEYS[1], KEYS[2]
local worker = ARGV[1]

local noted = 0
for i = 2, #ARGV, 3 do
  local said, progress, message = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local record = redis.call('SISMEMBER', claims, said) == 1 and read_claim(queue, said)
  if record then
    local active = queue .. ':active:' .. record.id
    if not record.job then
      become_job(queue, worker, said, record)
    end
    redis.call('HSET', active, 'progress', progress, 'message', message)
    notify(queue, record.id, 'progress')
    noted = noted + 1
  end
end
return {'ok', noted}
