-- The counters expire 30 days after a field was added. While tasks are claimed, this renews the 30 days when less than half
-- of them are left: EXPIRE goes to every replica and to the append-only file, PTTL does not.
local function keep_counts(base)
  if redis.call('PTTL', base .. ':counts') < 1296000000 then
    redis.call('EXPIRE', base .. ':counts', 2592000)
  end
end

-- Adds `n` to the counter `field` of the queue and publishes the queue event. `ids`: the first 100 ids among them are published
-- too (nil: none). Instead of ids, `reply`: the reply of a start, where the entry of a job ends with its id. `heard`: the reply
-- of NUMSUB for the queue's events, if a script asked before it collected ids (nil: ask).
local function tally(base, field, n, ids, heard, reply)
  if n == 0 then
    return
  end
  if redis.call('HINCRBY', base .. ':counts', field, n) == n then
    redis.call('EXPIRE', base .. ':counts', 2592000)
  end
  local events = base .. ':events'
  heard = heard or redis.pcall('PUBSUB', 'NUMSUB', events)
  if not heard[2] or heard[2] == 0 then
    return
  end
  local event, named = field .. ' ' .. string.format('%.0f', n), {}
  for _, entry in ipairs(reply or ids or named) do
    local id = not reply and entry or type(entry) == 'table' and entry[#entry]
    named[#named + 1] = id and #named < 100 and id or nil
  end
  if #named > 0 then -- first, on a channel of its own: subscribers without ids still get the plain event
    redis.pcall('PUBLISH', base .. ':event_ids', event .. '\n' .. table.concat(named, '\n'))
  end
  redis.pcall('PUBLISH', events, event)
end

-- Adds `n` (may be negative) to the number of references in the lists whose record is gone; publishes no event. Never below 0:
-- references of foreign producers, or from before the counters expired, were not counted.
local function tally_stale(base, n)
  if n ~= 0 then
    local stale = (tonumber(redis.call('HGET', base .. ':counts', 'stale')) or 0) + n
    if stale > 0 then
      redis.call('HSET', base .. ':counts', 'stale', stale)
      keep_counts(base)
    else
      redis.call('HDEL', base .. ':counts', 'stale')
    end
  end
end

-- Notes that `n` references without a record were removed from the lists. With nothing `left` in the lists, there are none.
local function untally_stale(base, n, left)
  tally_stale(base, -n)
  if left == 0 then
    redis.call('HDEL', base .. ':counts', 'stale')
  end
end

-- Returns how many tasks wait: the length of the lists without the references whose record is gone.
local function count_waiting(base)
  local items = redis.call('LLEN', base) + redis.call('LLEN', base .. ':suspects')
  return math.max(0, items - (tonumber(redis.call('HGET', base .. ':counts', 'stale')) or 0))
end

-- Returns how many tasks do not run: waiting, due later, or blocked by the run of their id.
local function count_queued(base)
  return count_waiting(base) + redis.call('ZCARD', base .. ':due') + redis.call('SCARD', base .. ':blocked')
end

-- Returns the server's clock in milliseconds.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
