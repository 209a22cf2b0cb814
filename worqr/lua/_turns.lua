-- Turns: which lane a start takes its next task from. Fair queueing by weight, as in network switches.
-- Each lane in the ring has a turn, and the one with the least is next. Its turn grows by 1 / weight for each start. A clock
-- grows by 1 / the sum of the weights for each start; a lane that gets something to do enters the ring at the clock, or at the
-- turn that is remembered of it if that is later. Without the memory, a lane whose tasks come one by one would get many times
-- its share. Without the clock, a stream of new lanes would keep a lane with a backlog from its share.
-- The queue's own list is a lane of weight 1 without a name. It is no member of the ring, because tasks may be pushed to it
-- by any client; the hash `:lanes` has its turn, in `main` while it has tasks and in `main_idle` while it has none.

local FORGOTTEN_LANES = 100 -- idle lanes that one request forgets at most
local LANES_READ_AT_ONCE = 1000
local MOST_TURNS = 1000000000000 -- a double still has a thousandth

-- Returns a turn as text, with all its digits.
local function turn_text(turn)
  return string.format('%.17g', turn)
end

-- Returns the turn that a text has, or `default`. Other programs can write it. Above MOST_TURNS, a start would not change it.
local function turn_number(text, default)
  local turn = tonumber(text)
  return turn and turn >= 0 and turn <= MOST_TURNS and turn or default
end

-- Returns the state of the turns. What its visits have changed is stored for all of them together, in settle_visits.
-- LATER: most queues have no lanes.
local function read_turns(base, wanted)
  local kept = redis.call('HMGET', base .. ':lanes', 'epoch', 'clock', 'weights', 'main', 'main_idle')
  local turns = {epoch = kept[1], clock = turn_number(kept[2], 0), weights = whole_number(kept[3], 0)}
  turns.main_waits = redis.call('LLEN', base) > 0
  turns.main = turn_number(kept[4], nil) or math.max(turns.clock, turn_number(kept[5], 0))
  local lines = redis.call('ZCARD', base .. ':lanes:ring') + (turns.main_waits and 1 or 0)
  turns.quantum = math.ceil(wanted / math.max(1, lines))
  turns.next, turns.names, turns.scores, turns.rules = 1, {}, {}, read_rules(base)
  turns.visits, turns.visit_of, turns.claims, turns.items = {}, {}, {}, 0
  return turns
end

-- Stores the state of the turns, and forgets idle lanes whose turn the clock has passed. When the ring is empty, it has passed all.
-- LATER: most queues have no lanes.
local function store_turns(base, turns)
  local lanes = base .. ':lanes'
  if redis.call('EXISTS', base .. ':lanes:ring') == 0 and not turns.main_waits then
    local last = redis.call('ZREVRANGE', base .. ':lanes:idle', 0, 0, 'WITHSCORES')
    turns.clock = math.max(turns.clock, turns.main, turn_number(last[2], 0))
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

-- Takes lanes that have nothing more to start now out of the ring: those without tasks, and those held by their concurrency.
-- LATER: most queues have no lanes.
local function leave_ring_together(base, turns, visits)
  local lanes, weights, empty, held, idle = {}, 0, {}, {}, {}
  for _, visit in ipairs(visits) do
    lanes[#lanes + 1], weights = visit.lane, weights + visit.rules.weight
    local kept = visit.left > 0 and held or visit.turn > turns.clock and idle
    if kept then
      kept[#kept + 1], kept[#kept + 2] = visit.turn, visit.lane
    end
    empty[#empty + 1] = visit.left == 0 and visit.lane or nil
  end
  if #lanes > 0 then
    redis.call('ZREM', base .. ':lanes:ring', unpack(lanes))
    add_to(base .. ':lanes', 'weights', -weights)
  end
  if #held > 0 then
    redis.call('ZADD', base .. ':lanes:held', unpack(held))
  end
  if #idle > 0 then
    redis.call('ZADD', base .. ':lanes:idle', unpack(idle))
  end
  if #empty > 0 then
    redis.call('ZREM', base .. ':lanes:names', unpack(empty))
  end
end

-- Gives claims (names and lanes in turn) their places, and counts the starts of the visited lanes.
-- LATER: most queues have no lanes.
local function note_lane_starts(start, turns)
  local base, claims, starts = start.base, turns.claims, {}
  for from = 1, #claims, 1000 do
    redis.call('HSET', base .. ':lanes:claims', unpack(claims, from, math.min(from + 999, #claims)))
  end
  for _, visit in ipairs(turns.visits) do
    local rates = visit.rules.rates
    starts[visit.lane] = visit.starts > 0 and visit.starts or nil
    for i = 1, visit.starts > 0 and #rates or 0, 2 do
      add_starts(base .. ':starts:' .. digits(rates[i + 1]) .. ':' .. visit.lane, rates[i + 1], visit.starts, start.now)
    end
  end
  if #claims > 0 then
    add_places(base, starts)
  end
end

-- Stores what the visits have changed: one command for many lanes where that is possible. A lane that is held by a rate or a pause
-- is filed alone, because a moment is noted for it. No lane gets a task while lanes are visited: a job that expires blocks none.
-- LATER: most queues have no lanes.
local function settle_visits(start, turns)
  local base, lanes, scores, leaving, filed = start.base, start.base .. ':lanes', {}, {}, {}
  note_lane_starts(start, turns)
  for _, visit in ipairs(turns.visits) do
    local is_full = visit.starts > 0 and visit.rules.concurrency and #visit.rules.rates == 0
    if visit.leaves and (visit.left == 0 or is_full) then
      leaving[#leaving + 1] = visit
    else
      scores[#scores + 1], scores[#scores + 2] = visit.turn, visit.lane
      filed[#filed + 1] = visit.leaves and visit or nil
    end
  end
  if #scores > 0 then
    redis.call('ZADD', base .. ':lanes:ring', unpack(scores))
  end
  if #turns.visits > 0 then
    add_to(lanes, 'waiting', -turns.items)
    redis.call('HSET', lanes, 'clock', turn_text(turns.clock))
  end
  leave_ring_together(base, turns, leaving)
  for _, visit in ipairs(filed) do
    file_lane(base, visit.lane, start.now, visit.rules)
  end
  turns.weights = whole_number(redis.call('HGET', lanes, 'weights'), 0)
  turns.visits, turns.visit_of, turns.claims, turns.items = {}, {}, {}, 0
end

-- Returns the lane whose turn it is, and its turn (nil: there is none). Reads as many lanes at a time as the start may need.
-- LATER: most queues have no lanes.
local function next_lane(start, turns)
  if not turns.names[turns.next] then
    settle_visits(start, turns)
    local most = math.min(start.wanted, LANES_READ_AT_ONCE)
    local ring = redis.call('ZRANGE', start.base .. ':lanes:ring', 0, most - 1, 'WITHSCORES')
    turns.next, turns.names, turns.scores = 1, {}, {}
    for i = 1, #ring, 2 do
      turns.names[#turns.names + 1], turns.scores[#turns.scores + 1] = ring[i], tonumber(ring[i + 1])
    end
    turns.unread = #turns.names == most and turns.scores[most] or math.huge
  end
  return turns.names[turns.next], turns.scores[turns.next]
end

-- Puts a lane among those that were read, unless one that was not read has its turn before.
-- LATER: most queues have no lanes.
local function keep_lane(turns, lane, turn)
  local at = #turns.names + 1
  if turn < turns.unread then
    while at > turns.next and turns.scores[at - 1] > turn do
      at = at - 1
    end
    table.insert(turns.names, at, lane)
    table.insert(turns.scores, at, turn)
  end
end

-- Returns what the start knows of a lane that it visits: its list, rules, how many references are left, how many tasks may start
-- (`room`), how many have started, its turn, and whether it `leaves` the ring.
-- LATER: most queues have no lanes.
local function visit_of(start, turns, lane)
  local visit = turns.visit_of[lane]
  if not visit then
    local base = start.base
    local rules, list = lane_rules(base, lane, turns.rules), lane_list(base, lane, turns.epoch)
    local left = lane_length(list)
    local room = left > 0 and lane_room(base, lane, rules, list, start.now) or 0
    visit = {lane = lane, list = list, rules = rules, left = left, room = room, starts = 0, turn = 0, leaves = false}
    turns.visit_of[lane], turns.visits[#turns.visits + 1] = visit, visit
  end
  return visit
end

-- Takes tasks of the `lane`, whose turn it is. A suspect moves to the suspects, with its place in the lane. Returns the status of
-- the last one.
-- LATER: most queues have no lanes.
local function visit_lane(start, turns, lane, turn)
  local visit, claims, before = visit_of(start, turns, lane), turns.claims, #start.mine
  local status, items, suspect = 'empty', 0, nil
  turns.next = turns.next + 1
  if visit.left > 0 then
    status, items, suspect = take(start, visit.list, math.min(turns.quantum, visit.room), lane)
  end
  for i = before + 1, #start.mine do
    claims[#claims + 1], claims[#claims + 2] = start.mine[i], lane
  end
  if status == 'suspect' then
    claims[#claims + 1], claims[#claims + 2] = ':' .. suspect, lane
  end
  local started, weight = #start.mine - before + (suspect and 1 or 0), visit.rules.weight
  turns.items = turns.items + items
  turns.clock = turns.clock + started / math.max(1, turns.weights + (turns.main_waits and 1 or 0))
  visit.left, visit.room, visit.starts = visit.left - items, visit.room - started, visit.starts + started
  visit.turn = turn + started / weight
  if visit.left == 0 or visit.room <= 0 or visit.rules.strict then
    visit.leaves, turns.weights = true, turns.weights - weight
  else
    keep_lane(turns, lane, visit.turn)
  end
  return status == 'suspect' and status or 'taken'
end

-- Takes tasks of the queue's own list, whose turn it is.
-- LATER: most queues have no lanes.
local function visit_main(start, turns)
  local before = #start.mine
  turns.main_waits = take(start, start.base, turns.quantum) ~= 'empty'
  local started = #start.mine - before
  turns.clock = turns.clock + started / math.max(1, turns.weights + 1)
  turns.main = turns.main + started
end

-- Takes tasks of the lanes in turn, and of the queue's own list, as many as the start may take. Returns `empty` if no task is left
-- that may start, `suspect` if a suspect has moved to the suspects, else `taken`.
-- LATER: most queues have no lanes.
local function take_turns(start)
  local base = start.base
  local turns, status = read_turns(base, start.wanted), 'taken'
  while status ~= 'empty' and status ~= 'suspect' and may_take(start) do
    local lane, turn = next_lane(start, turns)
    if turns.main_waits and not (turn and turn < turns.main) then
      visit_main(start, turns)
    elseif lane then
      status = visit_lane(start, turns, lane, turn)
    else
      status = 'empty'
    end
  end
  settle_visits(start, turns)
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
