-- Marks `claim` as to be cancelled and tells its owner.
local function mark(base, claim)
  if redis.call('SADD', base .. ':cancelling', claim) == 1 then
    redis.pcall('PUBLISH', base .. '_cancel', claim)
  end
end

-- Calls look(claim) for at most `budget` claims of the queue, in the order of worker ids and, within each, of claims. `after`
-- is '-', or where the last call ended: a claim, a space, its worker. Answers the same, '-' when all were looked at.
local function each_claim(base, after, budget, look)
  local last, behind = string.match(after, '^(%d+) (.*)$')
  local workers = redis.call('HKEYS', base .. ':workers')
  table.sort(workers)
  for _, worker in ipairs(workers) do
    if not behind or worker >= behind then
      for _, claim in ipairs(redis.call('SORT_RO', base .. ':claims:' .. worker)) do
        if worker ~= behind or tonumber(claim) > tonumber(last) then
          if budget <= 0 then
            return after
          end
          look(claim)
          after, budget = claim .. ' ' .. worker, budget - 1
        end
      end
    end
  end
  return '-'
end
