-- Marks `claim` as to be cancelled and tells its owner.
local function mark(base, claim)
  if redis.call('SADD', base .. ':cancelling', claim) == 1 then
    redis.pcall('PUBLISH', base .. '_cancel', claim)
  end
end

-- The workers that hold claims, or may, in the order of their ids. Reads their sets of claims: one of a wrong type is an error
-- before the first write.
local function holders_of(base)
  local workers = redis.call('HKEYS', base .. ':workers')
  table.sort(workers)
  for _, worker in ipairs(workers) do
    redis.call('SCARD', base .. ':claims:' .. worker)
  end
  return workers
end

-- Calls look(claim) for at most `budget` claims of `holders`, in the order of worker ids and, within each, of claims. `after`
-- is '-', or where the last call ended: a claim, a space, its worker. Answers the same, '-' when all were looked at.
local function each_claim(base, holders, after, budget, look)
  local last, behind = string.match(after, '^(%d+) (.*)$')
  for _, worker in ipairs(holders) do
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
