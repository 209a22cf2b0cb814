#!lua flags=allow-oom
-- forget_queues: forgets the names of queues that were found empty, unless one was noted lately, or a worker serves it.
-- KEYS[1] queues ZSET
-- KEYS[2] registered SET
-- KEYS[3] dying SET
-- ARGV[1] work_map_stem text that a worker id completes to its WorkMap
-- ARGV[2] unused_ms ms for which a name must not have been noted
-- ARGV[3..] names text, at most 100
-- RETURNS ok name... (those that are not known any more)
-- RESEND safe: a name that was noted meanwhile stays
-- USES counts
local queues, registered, dying = KEYS[1], KEYS[2], KEYS[3]
local work_map_stem, unused_ms = ARGV[1], tonumber(ARGV[2])

local latest, unused, served, reply = now_ms() - unused_ms, {}, {}, {'ok'}
for i = 3, #ARGV do
  local name = ARGV[i]
  local noted = redis.call('ZSCORE', queues, name)
  if not noted or tonumber(noted) <= latest then
    unused[#unused + 1] = name
  end
end
local function look_at(workers)
  for _, worker in ipairs(#unused > 0 and redis.call('SMEMBERS', workers) or {}) do
    for place, mapped in ipairs(redis.call('SMISMEMBER', work_map_stem .. worker, unpack(unused))) do
      served[place] = served[place] or mapped == 1
    end
  end
end
look_at(registered)
look_at(dying)
for place, name in ipairs(unused) do
  if not served[place] then
    redis.call('ZREM', queues, name)
    reply[#reply + 1] = name
  end
end
return reply
