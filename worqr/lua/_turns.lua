-- Turns: which lane a start takes its next task from. Fair queueing by weight, as in network switches.
-- Each lane in the ring has a turn, and the one with the least is next. Its turn grows by 1 / weight for each start. A clock
-- grows by 1 / the sum of the weights for each start; a lane that gets something to do enters the ring at the clock, or at the
-- turn that is remembered of it if that is later. Without the memory, a lane whose tasks come one by one would get many times
-- its share. Without the clock, a stream of new lanes would keep a lane with a backlog from its share.
-- The queue's own list is a lane of weight 1 without a name. It is no member of the ring, because tasks may be pushed to it
-- by any client; the hash `:lanes` has its turn, in `main` while it has tasks and in `main_idle` while it has none.

local FORGOTTEN_LANES = 100 -- idle lanes that one request forgets at most

-- Returns a turn as text, with all its digits.
local function turn_text(turn)
  return string.format('%.17g', turn)
end

-- Returns the state of the turns.
-- LATER: most queues have no lanes.
local function read_turns(base, wanted)
  local kept = redis.call('HMGET', base .. ':lanes', 'epoch', 'clock', 'weights', 'main', 'main_idle')
  local turns = {epoch = kept[1], clock = tonumber(kept[2]) or 0, weights = tonumber(kept[3]) or 0}
  turns.main_waits = redis.call('LLEN', base) > 0
  turns.main = tonumber(kept[4]) or math.max(turns.clock, tonumber(kept[5]) or 0)
  local lines = redis.call('ZCARD', base .. ':lanes:ring') + (turns.main_waits and 1 or 0)
  turns.quantum = math.ceil(wanted / math.max(1, lines))
  return turns
end

-- Stores the state of the turns, and forgets idle lanes whose turn the clock has passed. When the ring is empty, it has passed all.
-- LATER: most queues have no lanes.
local function store_turns(base, turns)
  local lanes = base .. ':lanes'
  if redis.call('EXISTS', base .. ':lanes:ring') == 0 and not turns.main_waits then
    local last = redis.call('ZREVRANGE', base .. ':lanes:idle', 0, 0, 'WITHSCORES')
    turns.clock = math.max(turns.clock, turns.main, tonumber(last[2]) or 0)
  end
  local name, other = 'main', 'main_idle'
  if not turns.main_waits then
    name, other = other, name
  end
  redis.call('HDEL', lanes, other)
  redis.call('HSET', lanes, 'clock', turn_text(turns.clock), name, turn_text(turns.main))
  local reached = turn_text(turns.clock)
  local passed = redis.call('ZRANGEBYSCORE', base .. ':lanes:idle', '-inf', reached, 'LIMIT', 0, FORGOTTEN_LANES)
  if #passed > 0 then
    redis.call('ZREM', base .. ':lanes:idle', unpack(passed))
  end
  drop_idle_lanes(base)
end

-- Gives the `claims` of a lane (names and values for `:lanes:claims` in turn) their places, and counts their starts.
-- LATER: most queues have no lanes.
local function note_lane_starts(base, lane, rules, claims, now)
  local n = #claims / 2
  if n == 0 then
    return
  end
  redis.call('HSET', base .. ':lanes:claims', unpack(claims))
  redis.call('HINCRBY', base .. ':lanes:running', lane, n)
  for i = 1, #rules.rates, 2 do
    local period = rules.rates[i + 1]
    add_starts(base .. ':starts:' .. digits(period) .. ':' .. lane, period, n, now)
  end
end

-- Takes tasks of the `lane`, whose turn it is. A suspect moves to the suspects, with its place in the lane. Returns the status of
-- the last one.
-- LATER: most queues have no lanes.
local function visit_lane(start, lane, turn, turns)
  local base, now = start.base, start.now
  local lanes, rules, list = base .. ':lanes', lane_rules(base, lane), lane_list(base, lane, turns.epoch)
  local length, room, before = lane_length(list), lane_room(base, lane, rules, list, now), #start.mine
  local status, items, suspect = 'empty', 0, nil
  if length > 0 then
    status, items, suspect = take(start, list, math.min(turns.quantum, room), lane)
  end
  local left, claims = length - items, {}
  for i = before + 1, #start.mine do
    claims[#claims + 1], claims[#claims + 2] = start.mine[i], lane
  end
  if status == 'suspect' then
    claims[#claims + 1], claims[#claims + 2] = ':' .. suspect, lane
  end
  note_lane_starts(base, lane, rules, claims, now)
  if length > left then
    redis.call('HINCRBY', lanes, 'waiting', left - length)
  end
  local started = #claims / 2
  turns.clock = turns.clock + started / math.max(1, turns.weights + (turns.main_waits and 1 or 0))
  redis.call('ZADD', base .. ':lanes:ring', turn_text(turn + started / rules.weight), lane)
  if left == 0 or started >= room or rules.strict then
    file_lane(base, lane, now)
    turns.weights = tonumber(redis.call('HGET', lanes, 'weights')) or 0
  end
  return status == 'suspect' and status or 'taken'
end

-- Takes tasks of the queue's own list, whose turn it is.
-- LATER: most queues have no lanes.
local function visit_main(start, turns)
  local before = #start.mine
  turns.main_waits = take(start, start.base, turns.quantum) ~= 'empty'
  local started = #start.mine - before
  turns.clock = turns.clock + started / (turns.weights + 1)
  turns.main = turns.main + started
end

-- Takes tasks of the lanes in turn, and of the queue's own list, as many as the start may take. Returns `empty` if no task is left
-- that may start, `suspect` if a suspect has moved to the suspects, else `taken`.
-- LATER: most queues have no lanes.
local function take_turns(start)
  local base = start.base
  local turns, status = read_turns(base, start.wanted), 'taken'
  while status ~= 'empty' and status ~= 'suspect' and may_take(start) do
    local first = redis.call('ZRANGE', base .. ':lanes:ring', 0, 0, 'WITHSCORES')
    local lane, turn = first[1], tonumber(first[2])
    if turns.main_waits and not (turn and turn < turns.main) then
      visit_main(start, turns)
    elseif lane then
      status = visit_lane(start, lane, turn, turns)
    else
      status = 'empty'
    end
  end
  turns.main_waits = redis.call('LLEN', base) > 0
  store_turns(base, turns)
  return status
end

-- Gives the place of the suspect `id`, which has waited with it, to its claim.
-- LATER: most suspects are in no lane.
local function move_place(base, lane, id, claim)
  redis.call('HDEL', base .. ':lanes:claims', ':' .. id)
  redis.call('HSET', base .. ':lanes:claims', claim, lane)
end
