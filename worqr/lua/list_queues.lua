#!lua flags=no-writes
-- list_queues: one page of the names of all queues, the most recently noted first.
-- KEYS[1] queues ZSET
-- KEYS[2] watched STRING
-- ARGV[1] limit names in one page
-- ARGV[2] after_noted ms at which the last name of the page before was noted, '' for the first page
-- ARGV[3] after_name text, that last name
-- RETURNS ok now names watched: now is the server's time in ms, names are names and the ms at which they were noted, in turn,
--   watched is 1 if a program reads snapshots of the mesh, else 0
-- RESEND safe: it only reads
local queues, watched = KEYS[1], KEYS[2]
local limit, after_noted, after_name = tonumber(ARGV[1]), ARGV[2], ARGV[3]

local from = 0
if after_noted ~= '' then
  if redis.call('ZSCORE', queues, after_name) == after_noted then
    from = redis.call('ZREVRANK', queues, after_name) + 1
  else -- it was noted again, or forgotten: begin with all that were noted in the same millisecond
    from = redis.call('ZCOUNT', queues, '(' .. after_noted, '+inf')
  end
end
local names = redis.call('ZREVRANGE', queues, from, from + limit - 1, 'WITHSCORES')
return {'ok', now_ms(), names, redis.call('EXISTS', watched)}
