#!lua flags=allow-oom
-- condemn_worker: the first step of a sweep: declares a worker dead if its beat is still what the leader saw. From here on
-- its own beat says dead, whoever revives. A worker that asked never to count as dead has a beat that stays: it is not.
-- To evict a worker is to condemn it whatever its beat is.
-- KEYS[1] registered SET
-- KEYS[2] dying SET
-- KEYS[3] worker_key STRING
-- ARGV[1] worker id
-- ARGV[2] seen beat that stands still, '' if the key is missing, '*' to condemn it whatever its beat is
-- RETURNS ok | alive | gone (it left, or was swept before)
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
