-- Adds `n` to the counter `field` of the queue and tells those who listen to its events.
local function tally(base, field, n)
  if n == 0 then
    return
  end
  if redis.call('HINCRBY', base .. ':counts', field, n) == n then
    redis.call('EXPIRE', base .. ':counts', 2592000)
  end
  local events = base .. ':events'
  if redis.call('PUBSUB', 'NUMSUB', events)[2] > 0 then
    redis.pcall('PUBLISH', events, field .. ' ' .. string.format('%.0f', n))
  end
end

-- Adds `n` to the number of references in the lists whose record is gone (n may be negative); no event.
local function tally_stale(base, n)
  if n ~= 0 then
    redis.call('HINCRBY', base .. ':counts', 'stale', n)
  end
end

-- Milliseconds of the server's clock.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
