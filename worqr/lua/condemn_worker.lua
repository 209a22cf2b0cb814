#!lua flags=allow-oom
-- condemn_worker: the first step of a recovery: declares a worker dead if its heartbeat is still what the leader saw. From then
-- on its own heartbeats return dead. The constant heartbeat (STAY) of a worker that never counts as dead is an exception.
-- To evict a worker, condemn it with any heartbeat.
-- KEYS[1] registered SET
-- KEYS[2] dying SET
-- KEYS[3] worker_key STRING
-- KEYS[4] log STREAM
-- ARGV[1] worker id
-- ARGV[2] seen heartbeat that stopped, '' if the key is missing, '*' to condemn it with any heartbeat
-- ARGV[3] who text, the person or program that evicts it, for the log of the mesh
-- ARGV[4] text why, for the log of the mesh
-- RETURNS ok | alive | gone (it left, or was recovered before)
-- RESEND safe: worker ids are never used again
local registered, dying, worker_key, log = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local worker, seen, who, text = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

if redis.call('SISMEMBER', registered, worker) == 0 then
  return {redis.call('SISMEMBER', dying, worker) == 1 and 'ok' or 'gone'}
end
local beat = own(redis.pcall('GET', worker_key))
if seen ~= '*' and beat and (beat ~= seen or beat == 'STAY') then
  return {'alive'}
end
redis.call('SMOVE', registered, dying, worker)
redis.call('DEL', worker_key)
add_to_log(log, 'dead', who, '', worker, '', '', text)
return {'ok'}
