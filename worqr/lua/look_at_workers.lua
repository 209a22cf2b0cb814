#!lua flags=no-writes
-- look_at_workers: returns, for the leader, the registered workers with their heartbeats, and the dead workers in recovery.
-- KEYS[1] registered SET
-- KEYS[2] dying SET
-- ARGV[1] worker_stem text before the worker id in its keepalive key
-- RETURNS ok run_id beats dying: beats are worker ids and heartbeats (false: none) in turn; run_id '' if INFO is not allowed
-- RESEND safe: it only reads
local registered, dying = KEYS[1], KEYS[2]
local worker_stem = ARGV[1]

local info = redis.pcall('INFO', 'server')
local run_id = type(info) == 'string' and string.match(info, 'run_id:(%w+)') or ''
local FOREIGN, beats = 'another application has written a key of another type', {}
for _, worker in ipairs(redis.call('SMEMBERS', registered)) do
  beats[#beats + 1] = worker
  local beat = own(redis.pcall('GET', worker_stem .. worker))
  beats[#beats + 1] = beat == nil and FOREIGN or beat
end
return {'ok', run_id, beats, own(redis.pcall('SMEMBERS', dying)) or {}}
