-- Marks `claim` for cancellation and publishes it: the worker that holds it then asks for its marks.
local function mark(base, claim)
  if redis.call('SADD', base .. ':cancelling', claim) == 1 then
    redis.pcall('PUBLISH', base .. '_cancel', claim)
  end
end

-- Marks many claims and notifies each worker that holds one of them, once, on the worker's own channel. One message per claim
-- to all workers would block the server for seconds. `marked`: claims and their workers in turn.
local function mark_all(base, marked)
  if #marked == 2 then
    return mark(base, marked[1])
  end
  local claims, told = {}, {}
  for i = 1, #marked, 2 do
    claims[#claims + 1] = marked[i]
  end
  for from = 1, #claims, 1000 do
    redis.call('SADD', base .. ':cancelling', unpack(claims, from, math.min(from + 999, #claims)))
  end
  for i = 2, #marked, 2 do
    local worker = marked[i]
    if not told[worker] then
      told[worker] = true
      redis.pcall('PUBLISH', base .. ':wake:' .. worker, 'c')
    end
  end
end

-- Returns the workers that hold claims, or may, in the order of their ids. Reads their sets of claims, so that a set of a wrong
-- type is an error before the first write.
local function holders_of(base)
  local workers = redis.call('HKEYS', base .. ':workers')
  table.sort(workers)
  for _, worker in ipairs(workers) do
    redis.call('SCARD', base .. ':claims:' .. worker)
  end
  return workers
end

-- Calls look(claim, worker) for at most `budget` claims of `holders`, in the order of worker ids and, within each, of claims.
-- `after` is '-', or the end of the last call: a claim, a space, its worker. Returns the next `after`, '-' when all are done.
local function each_claim(base, holders, after, budget, look)
  local last, behind = string.match(after, '^(%d+) (.*)$')
  for _, worker in ipairs(holders) do
    if not behind or worker >= behind then
      for _, claim in ipairs(redis.call('SORT_RO', base .. ':claims:' .. worker)) do
        if worker ~= behind or tonumber(claim) > tonumber(last) then
          if budget <= 0 then
            return after
          end
          look(claim, worker)
          after, budget = claim .. ' ' .. worker, budget - 1
        end
      end
    end
  end
  return '-'
end
