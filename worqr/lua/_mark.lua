-- USES end_claim
-- Marks `claim` as to be cancelled and tells its owner.
local function mark(base, claim)
  if redis.call('SADD', base .. ':cancelling', claim) == 1 then
    redis.pcall('PUBLISH', base .. '_cancel', claim)
  end
end

-- Calls look(claim) for the claims of the workers behind `after` (in order of their ids) until `budget` claims were
-- looked at; always at least those of one worker. Answers the last worker looked at, or '-' when all were.
local function each_claim(base, after, budget, look)
  local workers = redis.call('HKEYS', base .. ':workers')
  table.sort(workers)
  local looked = 0
  for _, worker in ipairs(workers) do
    if after == '-' or worker > after then
      if looked >= budget then
        return after
      end
      for _, claim in ipairs(redis.call('SMEMBERS', base .. ':claims:' .. worker)) do
        look(claim)
        looked = looked + 1
      end
      after = worker
    end
  end
  return '-'
end
