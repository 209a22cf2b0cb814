#!lua flags=allow-oom
-- read_snapshot: returns the newest snapshot of the mesh, and asks the leader to go on writing snapshots.
-- KEYS[1] snapshot STRING
-- KEYS[2] watched STRING
-- ARGV[1] watched_expire_s s
-- RETURNS ok now stored: now is the server's time in ms, stored the snapshot as msgpack, false if there is none
-- RESEND safe: it sets what it set
local snapshot, watched = KEYS[1], KEYS[2]
local watched_expire_s = ARGV[1]

local stored = redis.call('GET', snapshot)
redis.call('SET', watched, '1', 'EX', watched_expire_s)
return {'ok', now_ms(), stored}
