#!lua flags=allow-oom
-- post_scan: what the leader's scan has found: the queues with waiting tasks, for every heartbeat, and the snapshot of the mesh
-- while a program reads it.
-- KEYS[1] waiting SET
-- KEYS[2] snapshot STRING
-- ARGV[1] waiting_expire_s s
-- ARGV[2] snapshot_expire_s s
-- ARGV[3] stored bytes, the new snapshot as msgpack, '' for none
-- ARGV[4] prefix text, of the mesh, for the channel that announces a new snapshot
-- ARGV[5..] names of non-empty, unpaused queues, at most 100
-- RETURNS ok
-- RESEND safe: it stores the same again; the stored names are a hint
local waiting, snapshot = KEYS[1], KEYS[2]
local waiting_expire_s, snapshot_expire_s, stored, prefix = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

redis.call('DEL', waiting)
for i = 5, #ARGV do
  local name = ARGV[i]
  redis.call('SADD', waiting, name)
end
redis.call('EXPIRE', waiting, waiting_expire_s)
if stored ~= '' then
  redis.call('SET', snapshot, stored, 'EX', snapshot_expire_s)
  redis.pcall('PUBLISH', '{' .. prefix .. '}:snapshots', 'written')
end
return {'ok'}
