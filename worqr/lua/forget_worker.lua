#!lua flags=allow-oom
-- forget_worker: the last step of a dead worker's recovery, after all its queues were given back and unmapped.
-- KEYS[1] dying SET
-- KEYS[2] work_map SET
-- KEYS[3] info HASH
-- ARGV[1] worker id
-- RETURNS ok | busy queue... (queues that are still mapped)
-- RESEND safe: worker ids are never used again
local dying, work_map, info = KEYS[1], KEYS[2], KEYS[3]
local worker = ARGV[1]

local reply = {'busy'}
for _, queue in ipairs(own(redis.pcall('SRANDMEMBER', work_map, 100)) or {}) do
  reply[#reply + 1] = queue
end
if #reply > 1 then
  return reply
end
redis.call('SREM', dying, worker)
redis.call('DEL', info, work_map)
return {'ok'}
