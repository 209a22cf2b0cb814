#!lua flags=no-writes
-- inspect: a snapshot of one queue, for people and for the leader's scan.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] due ZSET
-- KEYS[4] failed ZSET
-- KEYS[5] broken ZSET
-- KEYS[6] paused STRING
-- KEYS[7] counts HASH
-- KEYS[8] trash LIST
-- KEYS[9] trash_suspects LIST
-- KEYS[10] trash_due ZSET
-- KEYS[11] trash_blocked SET
-- KEYS[12] blocked SET
-- KEYS[13] limits HASH
-- RETURNS ok waiting due running failed broken paused trash workers counts blocked next_in oldest declared override room
--   opens_in lanes held rules only_held batches relay open soon: paused is false or the reason, trash not 0 if there is
--   something to purge, workers the admitted ones, also leaving ones, counts names and values in turn, next_in ms until a job
--   is due or a waiting task may start (-1: not known), oldest ms since the job in front was due (-1: no job in front),
--   declared and override are false or limits as text, room how many tasks may start now (-1: no limit), opens_in ms until
--   time makes room (-1: it does not), lanes how many lanes have tasks, held how many of them may not start one, rules how
--   many fields say how lanes start, only_held 1 if tasks wait only in lanes that are held, batches how many have their home
--   here, relay 1 if there are messages for other queues, or batches to look at, open how many of the first MOST_READ batches
--   have not ended, soon how many jobs are due within SOON ms
-- RESEND safe: it only reads
local queue, workers, due, failed, broken = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local paused, counts, trash, trash_suspects = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local trash_due, trash_blocked, blocked, limits = KEYS[10], KEYS[11], KEYS[12], KEYS[13]

local SOON = 10000 -- ms
local PAUSED_BY_OTHER = 'the key of the pause has a foreign type'
local MOST_READ = 500 -- batches, in the order in which the leader looks at them: ended ones are mostly behind the others

local running, serving = count_running(queue, workers)
local now, waiting = now_ms(), waiting_length(queue)
local in_front = job_id(redis.call('LINDEX', queue, -1) or '')
local run_at = in_front and whole_number(own(redis.pcall('HGET', queue .. ':job:' .. in_front, 'run_at')))
local trashed = redis.call('EXISTS', trash, trash_suspects, trash_due, trash_blocked, queue .. ':trash:lanes')
local room, opens_in = tolerant(function() return room_of(queue, now) end)
local held = own(redis.pcall('ZCARD', queue .. ':lanes:held')) or 0
local next_in = tolerant(function() return next_start_in(queue, due, waiting, now) end)
room = room or math.huge
local only_held = room > 0 and held > 0 and tolerant(function() return startable_items(queue) end) == 0
if only_held then
  local opens = tolerant(function() return first_time(queue .. ':lanes:opens') end)
  room, opens_in = 0, opens and math.max(0, opens - now)
end
local open = 0
for _, id in ipairs(own(redis.pcall('ZRANGE', queue .. ':batches', 0, MOST_READ - 1)) or {}) do
  local state = own(redis.pcall('HGET', queue .. ':batch:' .. id, 'state'))
  open = open + ((state == 'open' or state == 'sealed') and 1 or 0)
end
local why = own(redis.pcall('GET', paused))
if why == nil then
  why = PAUSED_BY_OTHER
end
return {'ok', waiting, own(redis.pcall('ZCARD', due)) or 0, running, own(redis.pcall('ZCARD', failed)) or 0,
  own(redis.pcall('ZCARD', broken)) or 0, why, trashed, serving, own(redis.pcall('HGETALL', counts)) or {},
  own(redis.pcall('SCARD', blocked)) or 0, next_in or -1, run_at and math.max(0, now - run_at) or -1,
  own(redis.pcall('HGET', limits, 'declared')) or false, own(redis.pcall('HGET', limits, 'override')) or false,
  room == math.huge and -1 or room, opens_in or -1, own(redis.pcall('ZCARD', queue .. ':lanes:names')) or 0, held,
  own(redis.pcall('HLEN', queue .. ':lanes:rules')) or 0, only_held and 1 or 0,
  own(redis.pcall('ZCARD', queue .. ':batches')) or 0, tolerant(function() return needs_relay(queue, now) end) or 0, open,
  own(redis.pcall('ZCOUNT', due, '-inf', now + SOON)) or 0}
