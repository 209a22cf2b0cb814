#!lua flags=allow-oom
-- condemn_worker: the first step of a recovery: declares a worker dead if its heartbeat is still what the leader saw. From then
-- on its own heartbeats return dead. The constant heartbeat (STAY) of a worker that never counts as dead is an exception.
-- To evict a worker, condemn it with any heartbeat.
-- KEYS[1] registered SET
-- KEYS[2] dying SET
-- KEYS[3] worker_key STRING
-- ARGV[1] worker id
-- ARGV[2] seen heartbeat that stopped, '' if the key is missing, '*' to condemn it with any heartbeat
-- RETURNS ok | alive | gone (it left, or was recovered before)
-- RESEND safe: worker ids are never used again
local registered, dying, worker_key = KEYS[1], KEYS[2], KEYS[3]
local worker, seen = ARGV[1], ARGV[2]

if redis.call('SISMEMBER', registered, worker) == 0 then
  return {redis.call('SISMEMBER', dying, worker) == 1 and 'ok' or 'gone'}
end
local beat = redis.call('GET', worker_key)
if seen ~= '*' and beat and (beat ~= seen or beat == 'STAY') then
  return {'alive'}
end
redis.call('SMOVE', registered, dying, worker)
redis.call('DEL', worker_key)
return {'ok'}
