#!lua flags=allow-oom
-- drop_history: deletes the history of a queue, because other queues are busier.
-- KEYS[1] history STRING
-- KEYS[2] history10 STRING
-- RETURNS ok
-- RESEND safe: it deletes what it deleted
local history, history10 = KEYS[1], KEYS[2]

redis.call('DEL', history, history10)
return {'ok'}
