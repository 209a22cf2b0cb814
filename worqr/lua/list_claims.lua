#!lua flags=no-writes
-- list_claims: one page of the running tasks of a queue, by worker, the oldest claim first; also of workers that leave.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- ARGV[1] limit claims
-- ARGV[2] max_bytes bytes of payload of jobs that are read
-- ARGV[3] after_worker worker of the last claim of the page before, empty for the first page
-- ARGV[4] after_claim that claim, 0 for the first page
-- RETURNS ok entry...: an entry is claim worker summary, a summary as `summarize` returns it
-- RESEND safe: it only reads
local queue, workers = KEYS[1], KEYS[2]
local limit, max_bytes, after_worker, after_claim = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])

local reply, budget = {'ok'}, {left = max_bytes}
local holders = redis.call('HKEYS', workers)
table.sort(holders)
for _, worker in ipairs(holders) do
  local room = limit - #reply + 1
  if room <= 0 then
    break
  elseif worker >= after_worker then
    local held = queue .. ':claims:' .. worker
    local goes_on = worker == after_worker -- a worker has no more claims than it may run at once
    for _, claim in ipairs(redis.call('SORT_RO', held, 'LIMIT', 0, goes_on and -1 or room)) do
      if #reply <= limit and (not goes_on or tonumber(claim) > after_claim) then
        local item = own(redis.pcall('LINDEX', queue .. ':claim:' .. claim, 0)) or ''
        reply[#reply + 1] = {claim, worker, summarize(queue, 'active', item, budget)}
      end
    end
  end
end
return reply
