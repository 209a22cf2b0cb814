#!lua flags=allow-oom
-- keep_worker_alive: one heartbeat. Renews the key of a worker that was not declared dead, even an expired key. Takes or
-- renews the leader's lease if asked to. Returns the lease and the queues with waiting tasks. If a lease stops changing,
-- the worker takes it from its holder: a lease does not expire after the server's clock was set back. Notes since when all
-- heartbeats found no room.
-- KEYS[1] registered SET
-- KEYS[2] worker_key STRING
-- KEYS[3] leader STRING
-- KEYS[4] waiting SET
-- KEYS[5] info HASH
-- ARGV[1] worker id
-- ARGV[2] beat number
-- ARGV[3] keepalive_ms ms until the worker counts as dead, 0: never
-- ARGV[4] lease_ms ms, 0: do not ask for the lease
-- ARGV[5] info_expire_s s
-- ARGV[6] running tasks, for people
-- ARGV[7] room tasks, for people
-- ARGV[8] lag_ms ms by which its event loop was late, for people
-- ARGV[9] leaving 1 if it leaves, 2 if it is quiet, else 0, for people
-- ARGV[10] standing text, the lease that this worker has seen unchanged for longer than a lease lasts, '' for none
-- ARGV[11] answer text to the last request of an operator, after the id of that request; '' for none
-- RETURNS ok leads lease request queue... | revived leads lease request queue... | dead; request: what an operator asks, and the
--   worker has not answered, '' for nothing
-- RESEND safe: it sets what it set; a late copy gives a worker that is still registered one keepalive more
local registered, worker_key, leader, waiting, info = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local worker, beat, keepalive_ms, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local info_expire_s, running, room, lag_ms, leaving = ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local standing, answer = ARGV[10], ARGV[11]

if redis.call('SISMEMBER', registered, worker) == 0 then
  return {'dead'}
end
local status = redis.call('EXISTS', worker_key) == 1 and 'ok' or 'revived'
local lease, waits = own(redis.pcall('GET', leader)), own(redis.pcall('SMEMBERS', waiting)) or {}
write_hash(info, {running = running, room = room, lag_ms = lag_ms, leaving = leaving})
if tonumber(room) <= 0 and tonumber(running) > 0 then
  redis.call('HSETNX', info, 'full_since', digits(now_ms()))
else
  redis.call('HDEL', info, 'full_since')
end
redis.call('EXPIRE', info, info_expire_s)
if keepalive_ms > 0 then
  redis.call('SET', worker_key, 'RUN ' .. beat, 'PX', keepalive_ms)
else
  redis.call('SET', worker_key, 'STAY')
end
local leads = 0
if lease_ms > 0 and (not lease or lease == standing or string.match(lease, '^(.*) %d+$') == worker) then
  lease = worker .. ' ' .. beat
  redis.call('SET', leader, lease, 'PX', lease_ms)
  leads = 1
end
local request = redis.call('HGET', info, 'request') or ''
if answer ~= '' and request ~= '' and string.match(answer, '^%d+') == string.match(request, '^%d+') then
  redis.call('HSET', info, 'answer', answer)
  redis.call('HDEL', info, 'request')
  request = ''
end
local reply = {status, leads, lease or '', request}
for _, queue in ipairs(waits) do
  reply[#reply + 1] = queue
end
return reply
