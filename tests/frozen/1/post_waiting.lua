#!lua flags=allow-oom
-- post_waiting: the leader's scan tells every beat which queues wait.
-- KEYS[1] waiting SET
-- ARGV[1] waiting_expire_s s
-- ARGV[2..] names of non-empty, unpaused queues, at most 100
-- RETURNS ok
-- RESEND safe: it sets what it set; what stands here is a hint
local waiting = KEYS[1]
local waiting_expire_s = ARGV[1]

redis.call('DEL', waiting)
for i = 2, #ARGV do
  local name = ARGV[i]
  redis.call('SADD', waiting, name)
end
redis.call('EXPIRE', waiting, waiting_expire_s)
return {'ok'}
