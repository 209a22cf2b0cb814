-- True if `worker` runs a suspect: it may not take another one.
local function holds_suspect(base, worker)
  local place = redis.pcall('HGET', base .. ':workers', worker)
  local suspect = type(place) == 'string' and string.match(place, ' (%d+)$')
  return suspect and redis.call('EXISTS', base .. ':claim:' .. suspect) == 1
end

-- Wakes up to min(n, 16) hungry workers, each on its own channel. A publish that reaches nobody moves on to the next, 64
-- tries at most: a wake-up is a hint, and the scan finds what it misses. Where only suspects wait, a worker that runs one is
-- passed over and stays hungry.
local function wake(base, n)
  local left, tries, passed = math.min(n, 16), 64, {}
  local only_suspects = left > 0 and redis.call('LLEN', base) == 0 and redis.call('LLEN', base .. ':suspects') > 0
  while left > 0 and tries > 0 do
    local worker = redis.call('SPOP', base .. ':hungry')
    if not worker then
      break
    end
    if only_suspects and holds_suspect(base, worker) then
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

-- Wakes one more if a suspect waits: whoever has just ended a claim may have held the one suspect it is allowed.
local function wake_for_suspects(base)
  if redis.call('LLEN', base .. ':suspects') > 0 then
    wake(base, 1)
  end
end
