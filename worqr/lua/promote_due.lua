#!lua flags=allow-oom
-- promote_due: puts due jobs into the queue and wakes as many workers; returns when the next one is due.
-- KEYS[1] queue LIST
-- KEYS[2] due ZSET
-- ARGV[1] limit jobs in one call
-- RETURNS ok promoted next_in: ms until the next one is due, 0 if more are due now, -1 if there is none
-- RESEND safe: a copy promotes the jobs that are due then
local queue, due = KEYS[1], KEYS[2]
local limit = tonumber(ARGV[1])

check_types(queue)
local now = now_ms()
local pushed = promote(queue, limit, now)
wake(queue, pushed)
local following = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
local next_in = following[2] and math.max(0, tonumber(following[2]) - now) or -1
return {'ok', pushed, next_in}
