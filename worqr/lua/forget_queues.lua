#!lua flags=allow-oom
-- forget_queues: deletes the names of queues that were found empty. A name stays if it was noted lately, or if a dead worker in
-- recovery served the queue: its tasks may be given back there. Live workers note the queues that they serve.
-- KEYS[1] queues ZSET
-- KEYS[2] dying SET
-- ARGV[1] work_map_stem text before the worker id in the key of its work map
-- ARGV[2] unused_ms ms for which a name must not have been noted
-- ARGV[3] limit dead workers in recovery above which nothing is deleted
-- ARGV[4..] names text, at most 100
-- RETURNS ok name... (those that are no longer known) | busy (too many dead workers are in recovery)
-- RESEND safe: a name that was noted meanwhile stays
local queues, dying = KEYS[1], KEYS[2]
local work_map_stem, unused_ms, limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

if redis.call('SCARD', dying) > limit then
  return {'busy'}
end
local latest, unused, served, reply = now_ms() - unused_ms, {}, {}, {'ok'}
for i = 4, #ARGV do
  local name = ARGV[i]
  local noted = redis.call('ZSCORE', queues, name)
  if not noted or tonumber(noted) <= latest then
    unused[#unused + 1] = name
  end
end
for _, worker in ipairs(#unused > 0 and redis.call('SMEMBERS', dying) or {}) do
  for n, mapped in ipairs(redis.call('SMISMEMBER', work_map_stem .. worker, unpack(unused))) do
    served[n] = served[n] or mapped == 1
  end
end
for n, name in ipairs(unused) do
  if not served[n] then
    redis.call('ZREM', queues, name)
    reply[#reply + 1] = name
  end
end
return reply
