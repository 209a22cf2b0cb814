-- The counters expire 30 days after a field was added. While tasks are claimed, this renews the 30 days when less than half
-- of them are left: EXPIRE goes to every replica and to the append-only file, PTTL does not.
local function keep_counts(base)
  if redis.call('PTTL', base .. ':counts') < 1296000000 then
    redis.call('EXPIRE', base .. ':counts', 2592000)
  end
end

-- Adds `n` to the counter `field` of the queue and tells those who listen to its events. `ids`: of those among them that have
-- one, the first 100 are told (nil: none); or, instead, `reply`: what a start answers, where the entry of a job ends with its
-- id. `heard`: what NUMSUB answers for the events of the queue, if a script asked before it collected ids (nil: ask).
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
  if #named > 0 then -- first, on a channel of its own: whoever knows of no ids hears the event as ever
    redis.pcall('PUBLISH', base .. ':event_ids', event .. '\n' .. table.concat(named, '\n'))
  end
  redis.pcall('PUBLISH', events, event)
end

-- Adds `n` to the number of references in the lists whose record is gone (n may be negative); no event. Never below 0: there
-- are references that nobody counted, of a foreign producer or from before the counters expired.
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

-- Notes that `n` references to nothing were taken out of the lists. With nothing `left` in them there are none at all.
local function untally_stale(base, n, left)
  tally_stale(base, -n)
  if left == 0 then
    redis.call('HDEL', base .. ':counts', 'stale')
  end
end

-- How many tasks wait: what lies in the lists, without the references whose record is gone.
local function count_waiting(base)
  local items = redis.call('LLEN', base) + redis.call('LLEN', base .. ':suspects')
  return math.max(0, items - (tonumber(redis.call('HGET', base .. ':counts', 'stale')) or 0))
end

-- How many tasks are there that do not run: in line, due later, or blocked by their twins.
local function count_queued(base)
  return count_waiting(base) + redis.call('ZCARD', base .. ':due') + redis.call('SCARD', base .. ':blocked')
end

-- Milliseconds of the server's clock.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
