#!lua flags=allow-oom
-- promote_due: puts due jobs into the queue, files the lanes whose moment has come, and wakes workers for what may start now; returns when more may, because a job is
-- due, a rate allows it, or a pause ends.
-- KEYS[1] queue LIST
-- KEYS[2] due ZSET
-- ARGV[1] limit jobs in one call
-- RETURNS ok promoted next_in relay: next_in ms until then, 0 if more are due now, -1 if nothing is known; relay 1 if there are
--   messages for other queues, or batches to look at
-- RESEND safe: a copy promotes the jobs that are due then
local queue, due = KEYS[1], KEYS[2]
local limit = tonumber(ARGV[1])

check_types(queue)
redis.call('ZCARD', queue .. ':batches')
local now = now_ms()
local pushed = promote(queue, limit, now)
open_lanes(queue, limit, now)
local waiting = startable_items(queue)
wake(queue, waiting)
local start_in, check_in = next_start_in(queue, due, waiting, now), next_check_in(queue, now)
local next_in = (start_in < 0 or check_in >= 0 and check_in < start_in) and check_in or start_in
return {'ok', pushed, next_in, needs_relay(queue, now)}
