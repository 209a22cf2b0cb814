#!lua
-- note_runs: adds a worker's counts of runs to the totals of the queue.
-- KEYS[1] policy HASH
-- KEYS[2] runs HASH
-- ARGV[1] number of the worker's request on this queue, grows
-- ARGV[2..] fields field and how much to add to it, in turn
-- RETURNS ok | gone: the worker has left the queue, or was removed from it
-- RESEND safe: fenced by the number; an equal or lower one adds nothing
local policy, runs = KEYS[1], KEYS[2]
local number = tonumber(ARGV[1])

local last = redis.call('HMGET', policy, 'max_stalls', 'noted')
if not last[1] then
  return {'gone'}
end
if number <= (tonumber(last[2]) or -1) then
  return {'ok'}
end
redis.call('HLEN', runs)
redis.call('HSET', policy, 'noted', digits(number))
for i = 2, #ARGV, 2 do
  local field, n = ARGV[i], ARGV[i + 1]
  redis.call('HINCRBY', runs, field, n)
end
if redis.call('PTTL', runs) < COUNTS_EXPIRE * 500 then
  redis.call('EXPIRE', runs, COUNTS_EXPIRE)
end
return {'ok'}
