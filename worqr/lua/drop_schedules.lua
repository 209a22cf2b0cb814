#!lua flags=allow-oom
-- drop_schedules: deletes schedules that no worker has declared while the mesh was led for unseen_ms. Time without a leader, or
-- in which the leader was suspended, does not count, and the server's clock does not matter.
-- KEYS[1] schedules HASH
-- KEYS[2] schedules_due ZSET
-- KEYS[3] schedules_seen ZSET
-- ARGV[1] unseen_ms ms
-- ARGV[2] limit, how many at most
-- RETURNS ok name...
-- RESEND safe: a copy drops only what no worker has declared meanwhile
local schedules, schedules_due, schedules_seen = KEYS[1], KEYS[2], KEYS[3]
local unseen_ms, limit = tonumber(ARGV[1]), ARGV[2]

redis.call('ZCARD', schedules_due)
local led = whole_number(redis.call('HGET', schedules, 'led'), 0)
for _, name in ipairs(redis.call('ZRANGEBYSCORE', schedules_seen, '(' .. digits(led), '+inf', 'LIMIT', 0, limit)) do
  redis.call('ZADD', schedules_seen, digits(led), name) -- declared before the led time was lost
end
local reply = {'ok'}
local before = digits(led - unseen_ms)
for _, name in ipairs(redis.call('ZRANGEBYSCORE', schedules_seen, '-inf', before, 'LIMIT', 0, limit)) do
  for _, fact in ipairs({'def ', 'last ', 'next ', 'fired ', 'owed ', 'paused ', 'over '}) do
    redis.call('HDEL', schedules, fact .. name)
  end
  redis.call('ZREM', schedules_due, name)
  redis.call('ZREM', schedules_seen, name)
  reply[#reply + 1] = name
end
if #reply > 1 and redis.call('ZCARD', schedules_seen) == 0 then
  redis.call('DEL', schedules, schedules_due) -- 'led' and 'clock'
end
return reply
