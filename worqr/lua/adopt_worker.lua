#!lua flags=allow-oom
-- adopt_worker: marks a worker as dead that serves a queue but is not registered. Its claims are then recovered like those
-- of any other dead worker, even if a leader dies in between.
-- KEYS[1] registered SET
-- KEYS[2] dying SET
-- KEYS[3] work_map SET
-- ARGV[1] worker id
-- ARGV[2] queue name
-- RETURNS ok | alive (it is registered)
-- RESEND safe: worker ids are never used again, and what is already given back is not given back twice
local registered, dying, work_map = KEYS[1], KEYS[2], KEYS[3]
local worker, queue = ARGV[1], ARGV[2]

if redis.call('SISMEMBER', registered, worker) == 1 then
  return {'alive'}
end
redis.call('SCARD', work_map)
redis.call('SADD', dying, worker)
redis.call('SADD', work_map, queue)
return {'ok'}
