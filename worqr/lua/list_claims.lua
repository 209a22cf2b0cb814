#!lua flags=no-writes
-- list_claims: what runs on a queue, by worker, the oldest claim first; also of workers that leave.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- ARGV[1] limit claims
-- ARGV[2] max_bytes bytes of payload of jobs that are read
-- RETURNS ok entry...: an entry is claim worker glance, a glance as `glance` tells
-- RESEND safe: it only reads
-- USES glance
local queue, workers = KEYS[1], KEYS[2]
local limit, max_bytes = tonumber(ARGV[1]), tonumber(ARGV[2])

local reply, budget = {'ok'}, {left = max_bytes}
local holders = redis.call('HKEYS', workers)
table.sort(holders)
for _, worker in ipairs(holders) do
  local room = limit - #reply + 1
  if room <= 0 then
    break
  end
  for _, claim in ipairs(redis.call('SORT_RO', queue .. ':claims:' .. worker, 'LIMIT', 0, room)) do
    local item = redis.call('LINDEX', queue .. ':claim:' .. claim, 0) or ''
    reply[#reply + 1] = {claim, worker, glance(queue, 'active', item, budget)}
  end
end
return reply
