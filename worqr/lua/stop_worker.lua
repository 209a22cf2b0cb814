#!lua flags=allow-oom
-- stop_worker: a worker that no longer serves a queue leaves the registry, and releases the leader's lease.
-- KEYS[1] registered SET
-- KEYS[2] worker_key STRING
-- KEYS[3] work_map SET
-- KEYS[4] info HASH
-- KEYS[5] leader STRING
-- KEYS[6] log STREAM
-- ARGV[1] worker id
-- RETURNS ok | busy queue... (its work map is not empty: stop_work and unmap_work first) | gone (it was declared dead)
-- RESEND safe: worker ids are never used again
local registered, worker_key, work_map, info, leader, log = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local worker = ARGV[1]

if redis.call('SISMEMBER', registered, worker) == 0 then
  return {'gone'}
end
local reply = {'busy'}
for _, queue in ipairs(own(redis.pcall('SRANDMEMBER', work_map, 100)) or {}) do
  reply[#reply + 1] = queue
end
if #reply > 1 then
  return reply
end
local lease = own(redis.pcall('GET', leader))
redis.call('SREM', registered, worker)
redis.call('DEL', worker_key, info, work_map)
if lease and string.match(lease, '^(.*) %d+$') == worker then
  redis.call('DEL', leader)
end
log_member(log, 'left', worker, '')
return {'ok'}
