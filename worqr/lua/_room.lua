-- Room: how producers wait until a queue that is full has room for their tasks.
-- The hash `:waiters` has an entry for each call that waits. Its name is CHANNEL-NUMBER, the channel of the program and the number
-- of the call there. Its value is what the call waits for: the max_length, how many tasks need room together, the max_length of
-- their lane, the time in ms, and the lane; a bound that there is not is -.
-- A script that takes tasks out of the queue removes entries for which there is room, and publishes each number on
-- `:room:CHANNEL`. The program asks again then. An entry is a hint: messages may get lost, so a program also asks once a second,
-- which notes it again. So the hash expires soon after the last of them.

local WAITERS_EXPIRE = 10
local MAX_WAITERS = 10000 -- entries; with more, all are dropped, and calls that still wait note themselves again within a second
local WOKEN_PRODUCERS = 16
local BRIEF = 20 -- ms; a call that has waited no longer than this is woken when a part of the queue is free
local FREE_PART = 4 -- a part is a quarter of the bound

-- Returns the name and the number of tasks of `text`, the `waiter` of a request: CHANNEL-NUMBER TASKS. Nil if it is none.
local function parsed_waiter(text)
  local name, tasks = string.match(text, '^(%w+%-%d+) (%d+)$')
  if name and #text <= 64 and tonumber(tasks) > 0 then
    return name, tasks
  end
  return nil
end

-- Notes that a producer waits for room. Another application's value at the key leaves it to ask once a second.
-- LATER: few queues are full.
local function note_waiter(base, waiter, max_length, max_lane_length, lane)
  local waiters, name, tasks = base .. ':waiters', parsed_waiter(waiter)
  if (own(redis.pcall('HLEN', waiters)) or 0) >= MAX_WAITERS then
    redis.call('DEL', waiters)
  end
  local bounds = {max_length and digits(max_length) or '-', tasks, max_lane_length and digits(max_lane_length) or '-',
    digits(now_ms()), lane or ''}
  if own(redis.pcall('HSET', waiters, name, table.concat(bounds, ' '))) then
    redis.call('EXPIRE', waiters, WAITERS_EXPIRE)
  end
end

-- Returns the reply to an enqueue of so many `tasks` if the queue has no room for them, else nil and its `waiter` (nil: it does not
-- wait). `text`: the max_length, -1 for none; a space and the name of a call that waits may follow.
-- LATER: most enqueues have no bound.
local function refuse_enqueue(base, text, tasks)
  local bound, name = string.match(text, '^(-?%d+) ?(.*)$')
  local waiter = bound and name ~= '' and name .. ' ' .. digits(tasks) or nil
  assert(bound and (not waiter or parsed_waiter(waiter)), 'the bound must be a number; the name of a call may follow')
  local waiting, max_length = queued_length(base), tonumber(bound)
  if max_length < 0 or waiting + tasks <= max_length then
    return nil, waiter
  end
  if waiter then
    note_waiter(base, waiter, max_length)
  end
  return {'full', waiting}
end

-- True if `bound` has room for `tasks` more. For a `brief` wait, a part of it must be free before them.
local function bound_allows(bound, waiting, promised, tasks, brief)
  return waiting + promised + tasks <= bound and (not brief or waiting <= bound - math.floor(bound / FREE_PART))
end

-- True if a producer that waits for `wish` has room now. `promised`: for how many tasks others were woken, by lane, and in all
-- under the name ''. Counts the tasks of this one, if it has room.
-- LATER: few queues are full.
local function has_room(base, wish, length, promised, now)
  local bound, tasks, lane_bound, since, lane = string.match(wish, '^(%S+) (%d+) (%S+) (%d+) (.*)$')
  bound, tasks, lane_bound = tonumber(bound or ''), tonumber(tasks or '') or 0, tonumber(lane_bound or '')
  local brief = now - (tonumber(since or '') or 0) <= BRIEF
  if bound and not bound_allows(bound, length, promised[''], tasks, brief) then
    return false
  elseif lane_bound then
    local waiting = lane_length(lane_list(base, lane, redis.call('HGET', base .. ':lanes', 'epoch')))
    if not bound_allows(lane_bound, waiting, promised[lane] or 0, tasks, brief) then
      return false
    end
    promised[lane] = (promised[lane] or 0) + tasks
  end
  promised[''] = promised[''] + tasks
  return true
end

-- Wakes some of the producers that wait for room, as many as have room together. One that does not listen any more is removed,
-- and takes no room. An error (a key has a foreign type) ends it quietly, because the caller has written already.
-- LATER: few queues are full.
local function wake_producers(base)
  local waiters = base .. ':waiters'
  local found = own(redis.pcall('HRANDFIELD', waiters, WOKEN_PRODUCERS, 'WITHVALUES')) or {}
  local known, length = pcall(function()
    return queued_length(base)
  end)
  local promised, now = {[''] = 0}, now_ms()
  for i = 1, known and #found or 0, 2 do
    local before, channel, number = promised[''], string.match(found[i], '^(%w+)%-(%d+)$')
    local checked, fits = pcall(function()
      return has_room(base, found[i + 1], length, promised, now)
    end)
    if checked and fits then
      redis.call('HDEL', waiters, found[i])
      local receivers = redis.pcall('PUBLISH', base .. ':room:' .. (channel or ''), number or '')
      if receivers == 0 then
        promised[''] = before
      end
    end
  end
end

-- Wakes producers if some wait for room: the caller has taken tasks out of the queue.
local function give_room(base)
  if redis.call('EXISTS', base .. ':waiters') == 1 then
    wake_producers(base)
  end
end

-- Removes the entry of a producer that has found room, and wakes others if there is more.
-- LATER: few producers wait.
local function leave_waiters(base, waiter)
  if redis.call('EXISTS', base .. ':waiters') == 1 then
    own(redis.pcall('HDEL', base .. ':waiters', (parsed_waiter(waiter))))
    wake_producers(base)
  end
end
