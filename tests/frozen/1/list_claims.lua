#!lua flags=no-writes
-- A task item is a payload, or this marker and the id of a job whose record holds the payload.
local MARKER = '\0worqr\0'

-- The id of the job that `item` refers to; nil for a payload.
local function job_id(item)
  if string.sub(item, 1, 7) == MARKER then
    return string.sub(item, 8)
  end
  return nil
end

-- list_claims: what runs on a queue, by worker, the oldest claim first; also of workers that leave.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- ARGV[1] limit claims
-- RETURNS ok entry...: an entry is claim worker, and of a job failures progress message run_at, else false
-- RESEND safe: it only reads
-- USES reference
local queue, workers = KEYS[1], KEYS[2]
local limit = tonumber(ARGV[1])

local reply = {'ok'}
local holders = redis.call('HKEYS', workers)
table.sort(holders)
for _, worker in ipairs(holders) do
  local room = limit - #reply + 1
  if room <= 0 then
    break
  end
  for _, claim in ipairs(redis.call('SORT_RO', queue .. ':claims:' .. worker, 'LIMIT', 0, room)) do
    local id = job_id(redis.call('LINDEX', queue .. ':claim:' .. claim, 0) or '')
    local active = queue .. ':active:' .. (id or '')
    local kept = id and redis.call('HMGET', active, 'failures', 'progress', 'message', 'run_at') or {}
    reply[#reply + 1] = {claim, worker, kept[1] or false, kept[2] or false, kept[3] or false, kept[4] or false}
  end
end
return reply
