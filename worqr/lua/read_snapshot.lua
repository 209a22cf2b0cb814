#!lua flags=allow-oom
-- read_snapshot: returns the newest snapshot of the mesh, and how full the server's memory is; asks the leader to go on writing
-- snapshots.
-- KEYS[1] snapshot STRING
-- KEYS[2] watched STRING
-- ARGV[1] watched_expire_s s
-- RETURNS ok now stored used limit: now is the server's time in ms, stored the snapshot as msgpack, false if there is none; used
--   are the bytes that count against the limit of its memory. A limit of 0: there is none, or the user may not ask
-- RESEND safe: it sets what it set
local snapshot, watched = KEYS[1], KEYS[2]
local watched_expire_s = ARGV[1]

local stored = own(redis.pcall('GET', snapshot)) or false
redis.call('SET', watched, '1', 'EX', watched_expire_s)
local info = redis.pcall('INFO', 'memory')
local memory = type(info) == 'string' and info or ''
local function value(name)
  return tonumber(string.match(memory, '\n' .. name .. ':(%d+)')) or 0
end
return {'ok', now_ms(), stored, value('used_memory') - value('mem_not_counted_for_evict'), value('maxmemory')}
