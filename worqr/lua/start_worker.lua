#!lua flags=allow-oom
-- start_worker: registers a worker; refuses a mesh of another wire version.
-- KEYS[1] producer HASH
-- KEYS[2] registered SET
-- KEYS[3] worker_key STRING
-- KEYS[4] version STRING
-- KEYS[5] info HASH
-- KEYS[6] log STREAM
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] worker id
-- ARGV[4] keepalive_ms ms until the worker counts as dead, 0: never
-- ARGV[5] wire_version whole number
-- ARGV[6] info_expire_s s
-- ARGV[7] text for the log of the mesh
-- ARGV[8..] facts names and values in turn, for people
-- RETURNS ok | version found | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not register a worker that left
-- NUMBERED
local registered, worker_key, version, info, log = KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local worker, keepalive_ms = ARGV[3], tonumber(ARGV[4])
local wire_version, info_expire_s, text = ARGV[5], ARGV[6], ARGV[7]

local found = redis.call('GET', version)
if found and found ~= wire_version then
  return {'version', found}
end
redis.call('SCARD', registered)
redis.call('HLEN', info)
if not found then
  redis.call('SET', version, wire_version)
end
redis.call('SADD', registered, worker)
if keepalive_ms > 0 then
  redis.call('SET', worker_key, 'RUN 0', 'PX', keepalive_ms)
else
  redis.call('SET', worker_key, 'STAY')
end
for i = 8, #ARGV, 2 do
  local fact, value = ARGV[i], ARGV[i + 1]
  redis.call('HSET', info, fact, value)
end
redis.call('HSET', info, 'started', digits(now_ms()))
redis.call('EXPIRE', info, info_expire_s)
log_member(log, 'joined', worker, text)
return {'ok'}
