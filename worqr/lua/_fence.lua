-- A fence number as text; a plain tostring would print 1.7e+15.
local function digits(number)
  return string.format('%.0f', number)
end

-- Returns the queue's next fence number, and the clock in milliseconds. The number is above the last one and above the clock,
-- so that it never decreases.
local function next_fence(base)
  local last = tonumber(redis.call('HGET', base .. ':counts', 'fence')) or 0
  local time = redis.call('TIME')
  return math.max(last + 1, time[1] * 1000000 + time[2]), time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Stores the last fence number that was assigned.
local function note_fence(base, number)
  if redis.call('HSET', base .. ':counts', 'fence', digits(number)) == 1 then
    redis.call('EXPIRE', base .. ':counts', 2592000)
  end
end
