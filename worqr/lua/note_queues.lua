#!lua
-- note_queues: notes that queues are in use now, so that scans and lists find their names.
-- KEYS[1] queues ZSET
-- ARGV[1] queues_expire_s s
-- ARGV[2..] names text
-- RETURNS ok
-- RESEND safe: a copy notes the same names again, with a later time
local queues = KEYS[1]
local queues_expire_s = ARGV[1]

local now = now_ms()
for i = 2, #ARGV do
  local name = ARGV[i]
  redis.call('ZADD', queues, now, name)
end
redis.call('EXPIRE', queues, queues_expire_s)
return {'ok'}
