#!lua
-- note_queues: remembers names of queues that tasks were put into, so that scans and lists find them.
-- KEYS[1] queues SET
-- ARGV[1] queues_expire_s s
-- ARGV[2..] names text
-- RETURNS ok
-- RESEND safe: it sets what it set
local queues = KEYS[1]
local queues_expire_s = ARGV[1]

for i = 2, #ARGV do
  local name = ARGV[i]
  redis.call('SADD', queues, name)
end
redis.call('EXPIRE', queues, queues_expire_s)
return {'ok'}
