#!lua flags=allow-oom
-- inspect: what there is to know of one queue, for people and for the leader's scan; keeps the counters from expiring.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] due ZSET
-- KEYS[4] failed ZSET
-- KEYS[5] broken ZSET
-- KEYS[6] paused STRING
-- KEYS[7] counts HASH
-- KEYS[8] trash LIST
-- KEYS[9] trash_suspects LIST
-- RETURNS ok waiting due running failed broken paused trash workers counts: paused is false or the reason, trash 1 if there
--   is something to purge, workers the fence's members and those who leave it, counts names and values in turn
-- RESEND safe: it changes no task
-- USES counts
local queue, workers, due, failed, broken = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local paused, counts, trash, trash_suspects = KEYS[6], KEYS[7], KEYS[8], KEYS[9]

local serving, running = redis.call('HKEYS', workers), 0
for _, worker in ipairs(serving) do
  running = running + redis.call('SCARD', queue .. ':claims:' .. worker)
end
local reply = {'ok', count_waiting(queue), redis.call('ZCARD', due), running, redis.call('ZCARD', failed),
  redis.call('ZCARD', broken), redis.call('GET', paused), redis.call('EXISTS', trash, trash_suspects),
  serving, redis.call('HGETALL', counts)}
redis.call('EXPIRE', counts, 2592000)
return reply
