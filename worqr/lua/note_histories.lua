#!lua
-- note_histories: notes which queues have a history, by the minute in which it was written last.
-- KEYS[1] histories ZSET
-- ARGV[1] expire_s s
-- ARGV[2] dropped name of a queue whose history was deleted, '' for none
-- ARGV[3..] names of queues, at most 1,000
-- RETURNS ok name minute...: all queues that have a history
-- RESEND safe: a copy notes the same names again, with a later time
local histories = KEYS[1]
local expire_s, dropped = ARGV[1], ARGV[2]

redis.call('ZREM', histories, dropped)
local minute = math.floor(now_ms() / 60000)
for i = 3, #ARGV do
  local name = ARGV[i]
  redis.call('ZADD', histories, minute, name)
end
redis.call('EXPIRE', histories, expire_s)
local reply = redis.call('ZRANGE', histories, 0, 999, 'WITHSCORES')
table.insert(reply, 1, 'ok')
return reply
