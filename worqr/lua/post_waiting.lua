#!lua flags=allow-oom
-- post_waiting: the leader's scan announces the queues with waiting tasks to every heartbeat.
-- KEYS[1] waiting SET
-- ARGV[1] waiting_expire_s s
-- ARGV[2..] names of non-empty, unpaused queues, at most 100
-- RETURNS ok
-- RESEND safe: it stores the same again; the stored names are a hint
local waiting = KEYS[1]
local waiting_expire_s = ARGV[1]

redis.call('DEL', waiting)
for i = 2, #ARGV do
  local name = ARGV[i]
  redis.call('SADD', waiting, name)
end
redis.call('EXPIRE', waiting, waiting_expire_s)
return {'ok'}
