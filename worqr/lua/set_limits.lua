#!lua flags=allow-oom
-- set_limits: sets the limits of a queue in place of those that its workers declare, or removes them. Tasks that run continue. If
-- tasks may start now, workers are woken.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] limits text of _limits.lua, empty: the queue has none, *: those that the workers declare
-- RETURNS ok changed: 1 if other limits hold now | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo a later change
-- NUMBERED
local queue = KEYS[2]
local limits = ARGV[3]

assert(limits == '*' or are_limits(limits), 'limits must be like 10 100/60000')
check_types(queue)
return {'ok', set_limits(queue, 'override', limits ~= '*' and limits) and 1 or 0}
