#!lua
-- note_runs: adds a worker's counts of runs to the totals of the queue, and stores the runs that ended last, if the worker keeps
-- them.
-- KEYS[1] policy HASH
-- KEYS[2] runs HASH
-- KEYS[3] recent LIST
-- ARGV[1] number of the worker's request on this queue, grows
-- ARGV[2] keep how many ended runs the queue keeps
-- ARGV[3] ended runs that have ended, the last one at the end: JSON, a line for each; or ''
-- ARGV[4..] fields field and how much to add to it, in turn
-- RETURNS ok | gone: the worker has left the queue, or was removed from it
-- RESEND safe: fenced by the number; an equal or lower one adds nothing
local policy, runs, recent = KEYS[1], KEYS[2], KEYS[3]
local number, keep, ended = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]

local RECENT_EXPIRE = 86400 -- s after the last run: one day

local last = redis.call('HMGET', policy, 'max_stalls', 'noted')
if not last[1] then
  return {'gone'}
end
if number <= whole_number(last[2], -1) then
  return {'ok'}
end
redis.call('HLEN', runs)
redis.call('HSET', policy, 'noted', digits(number))
for i = 4, #ARGV, 2 do
  local field, n = ARGV[i], ARGV[i + 1]
  add_to(runs, field, n)
end
if redis.call('PTTL', runs) < COUNTS_EXPIRE * 500 then
  redis.call('EXPIRE', runs, COUNTS_EXPIRE)
end
if ended ~= '' then
  local lines = {}
  for line in string.gmatch(ended, '[^\n]+') do
    lines[#lines + 1] = line
  end
  local kept = own(redis.pcall('LPUSH', recent, unpack(lines)))
  if kept then
    if kept > keep then
      redis.call('RPOP', recent, kept - keep)
    end
    redis.call('EXPIRE', recent, RECENT_EXPIRE)
  end
end
return {'ok'}
