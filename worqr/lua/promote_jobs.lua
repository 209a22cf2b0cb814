#!lua flags=allow-oom
-- promote_jobs: makes scheduled jobs due now and puts them at the back of the queue, in the order of their names. A job that is
-- not scheduled stays as it is.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] due ZSET
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3..] ids of the jobs, 1000 at most
-- RETURNS ok promoted | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local queue, due = KEYS[2], KEYS[3]

check_types(queue)
local promoted, ready, now = 0, 0, now_ms()
for i = 3, #ARGV do
  local id = ARGV[i]
  local kept = own(redis.pcall('HMGET', queue .. ':job:' .. id, 'state', 'suspect', 'lane'))
  if kept and kept[1] == 'due' and redis.call('ZREM', due, id) == 1 then
    redis.call('HSET', queue .. ':job:' .. id, 'run_at', digits(now))
    ready = ready + enqueue_job(queue, id, 0, now, false, kept[2], kept[3])
    promoted = promoted + 1
  end
end
wake(queue, ready)
return {'ok', promoted}
