-- Wakes up to min(n, 16) waiting workers, each on its own channel. A publish without a receiver moves on to the next worker, 64
-- attempts at most: a wake-up is a hint, and the leader's scan finds what it misses. If only suspects wait, a worker that runs
-- a suspect is skipped and stays in the set.
local function wake(base, n)
  local left, tries, passed = math.min(n, 16), 64, {}
  local only_suspects = left > 0 and redis.call('LLEN', base) == 0 and redis.call('LLEN', base .. ':suspects') > 0
  while left > 0 and tries > 0 do
    local worker = redis.call('SPOP', base .. ':hungry')
    if not worker then
      break
    end
    local place = only_suspects and redis.pcall('HGET', base .. ':workers', worker)
    local suspect = type(place) == 'string' and string.match(place, ' (%d+)$')
    if suspect and redis.call('EXISTS', base .. ':claim:' .. suspect) == 1 then
      passed[#passed + 1] = worker
    else
      local heard = redis.pcall('PUBLISH', base .. ':wake:' .. worker, '1')
      if type(heard) == 'number' and heard > 0 then
        left = left - 1
      end
    end
    tries = tries - 1
  end
  if #passed > 0 then
    redis.call('SADD', base .. ':hungry', unpack(passed))
  end
end
