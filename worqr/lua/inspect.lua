#!lua flags=allow-oom
-- inspect: what there is to know of one queue, for people and for the leader's scan; keeps the counters from expiring.
-- KEYS[1] queue LIST
-- KEYS[2] suspects LIST
-- KEYS[3] workers HASH
-- KEYS[4] due ZSET
-- KEYS[5] failed ZSET
-- KEYS[6] broken ZSET
-- KEYS[7] paused STRING
-- KEYS[8] counts HASH
-- KEYS[9] trash LIST
-- KEYS[10] trash_suspects LIST
-- RETURNS ok waiting due running failed broken paused trash workers counts: paused is false or the reason, trash 1 if there
--   is something to purge, workers the fence's members, counts names and values in turn
-- RESEND safe: it changes no task
-- USES counts
local queue, suspects, workers, due = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local failed, broken, paused, counts = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local trash, trash_suspects = KEYS[9], KEYS[10]

local serving, running = redis.call('HKEYS', workers), 0
for _, worker in ipairs(serving) do
  running = running + redis.call('SCARD', queue .. ':claims:' .. worker)
end
local waiting = redis.call('LLEN', queue) + redis.call('LLEN', suspects)
local stale = tonumber(redis.call('HGET', counts, 'stale')) or 0
redis.call('EXPIRE', counts, 2592000)
return {'ok', math.max(0, waiting - stale), redis.call('ZCARD', due), running, redis.call('ZCARD', failed),
  redis.call('ZCARD', broken), redis.call('GET', paused), redis.call('EXISTS', trash, trash_suspects),
  serving, redis.call('HGETALL', counts)}
