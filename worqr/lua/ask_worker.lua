#!lua flags=allow-oom
-- ask_worker: stores what an operator asks of a worker. The reply to its next heartbeat has it, until the worker has answered.
-- An earlier request that was not answered yet is replaced, but for the part that the new one does not name.
-- KEYS[1] producer HASH
-- KEYS[2] registered SET
-- KEYS[3] info HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] worker id
-- ARGV[4] mode text, '' to ask for none
-- ARGV[5] concurrency text, '' to ask for none
-- ARGV[6] info_expire_s s
-- RETURNS ok | unknown | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not replace a newer request
-- NUMBERED
local registered, info = KEYS[2], KEYS[3]
local worker, mode, concurrency, info_expire_s = ARGV[3], ARGV[4], ARGV[5], ARGV[6]

if redis.call('SISMEMBER', registered, worker) == 0 then
  return {'unknown'}
end
local kept = redis.call('HGET', info, 'request') or ''
local before, kept_mode, kept_concurrency = string.match(kept, '^(%d+) (%S+) (%S+)$')
local id = digits(math.max(now_ms(), whole_number(before, 0) + 1))
mode = mode ~= '' and mode or kept_mode or '-'
concurrency = concurrency ~= '' and concurrency or kept_concurrency or '-'
redis.call('HSET', info, 'request', id .. ' ' .. mode .. ' ' .. concurrency)
redis.call('HDEL', info, 'answer')
redis.call('EXPIRE', info, info_expire_s)
return {'ok'}
