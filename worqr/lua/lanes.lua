-- Lanes: lines of jobs within a queue that take turns, each with a weight and limits of its own.
-- A lane with tasks is in the zset `:lanes:ring` if one of them may start, else in `:lanes:held`. A lane without tasks is in
-- `:lanes:idle` while it is remembered. All three are ordered by turn. file_lane computes where a lane belongs, and
-- each script that may change this calls it, but for a start, which moves many lanes together. So a start reads only lanes of
-- which a task may start.
-- `:lanes:opens` has the moments (ms) at which time alone may let a lane start, and `:lanes:names` the lanes with tasks.
-- `:lanes:claims` has the lane of each claim, and of each suspect that waits (a colon and its id): it has its place already.
-- `:lanes:running` counts these for each lane. `:lane:EPOCH:LANE` is the list of a lane; a clearing begins a new epoch.
-- The hash `:lanes` has the epoch, how many references the lists have (`waiting`), how many of these are left over in a lane from
-- jobs that do not wait there any more (`gone:LANE`), and the state of the turns.
-- `:lanes:rules` has what workers declare (`declared ...`), and for each lane what an operator sets (`weight:LANE`, `limit:LANE`,
-- `pause:LANE`, which begins with the ms at which it ends, 0 for never).

local LANE_NAME_BYTES = 200
local RULES_READ_AT_ONCE = 100 -- fields; where there are more, a script reads those of each lane that it needs
local PASSED_OVER = 1000 -- references in front of a strict lane
local FILED_AT_ONCE = 100 -- lanes that one script files at most, because time made room or other rules hold

-- True if the value can be the name of a lane.
local function is_lane(value)
  return type(value) == 'string' and #value >= 1 and #value <= LANE_NAME_BYTES and not string.find(value, '%c')
    and is_utf8(value)
end

-- Returns the key of the list of a lane. `epoch`: of the hash `:lanes` (false: there was no clearing).
local function lane_list(base, lane, epoch)
  return base .. ':lane:' .. (epoch or '0') .. ':' .. lane
end

-- Returns the length of a lane's list. Another application's value at its key is deleted: the key is the queue's own.
local function lane_length(list)
  local length = own(redis.pcall('LLEN', list))
  if not length then
    redis.call('DEL', list)
  end
  return length or 0
end

-- Returns how many tasks wait in a lane: the length of its list, without the references of jobs that do not wait there any more.
local function lane_waiting(base, lane)
  local kept = redis.call('HMGET', base .. ':lanes', 'epoch', 'gone:' .. lane)
  return math.max(0, lane_length(lane_list(base, lane, kept[1])) - whole_number(kept[2], 0))
end

-- Adds `n` (may be negative) to the references of a lane whose jobs do not wait there any more.
local function add_gone(base, lane, n)
  local field = 'gone:' .. lane
  local gone = whole_number(redis.call('HGET', base .. ':lanes', field), 0) + n
  set_field(base .. ':lanes', field, gone > 0 and digits(gone) or nil)
end

-- Notes that the waiting job `id` leaves its lane, and its reference stays. A suspect that has its place has no reference there.
local function note_gone(base, lane, id)
  if redis.call('HEXISTS', base .. ':lanes:claims', ':' .. id) == 0 then
    add_gone(base, lane, 1)
  end
end

-- Returns the names of the fields of `:lanes:rules` that rule the lane, as rules_of takes their values.
local function rule_names(lane)
  return 'weight:' .. lane, 'declared weight:' .. lane, 'limit:' .. lane, 'declared limit:' .. lane, 'pause:' .. lane,
    'declared limit', 'declared strict'
end

-- Returns the rules of a lane: its weight, concurrency (false: none), rates (as limits_of), limits (both as text), whether it is
-- strict, and the end and the reason of its pause (nil: not paused).
local function rules_of(weight, declared_weight, limit, declared_limit, pause, limit_of_all, strict)
  local limits = limit or declared_limit or limit_of_all or ''
  local concurrency, rates = parsed_limits(limits)
  local ends_at, reason = string.match(pause or '', '^(%d+) (.*)$')
  return {weight = math.max(1, whole_number(weight or declared_weight, 1, MAX_WEIGHT)), limits = limits, concurrency = strict and 1 or concurrency,
    rates = rates, strict = strict and true, paused_until = ends_at and whole_number(ends_at, 0, LATEST), reason = reason}
end

-- Returns the rules of all lanes, for lane_rules: the `fields` that are stored, the lanes that they name, and the rules of all
-- `others`. Returns nil if there are too many fields to read them all.
local function read_rules(base)
  local rules = base .. ':lanes:rules'
  if redis.call('HLEN', rules) > RULES_READ_AT_ONCE then
    return nil
  end
  local fields, named = read_hash(rules) or {}, {}
  for field in pairs(fields) do
    named[string.match(field, ':(.*)$') or ''] = true
  end
  local others = rules_of(nil, nil, nil, nil, nil, fields['declared limit'], fields['declared strict'])
  return {fields = fields, named = named, others = others}
end

-- Returns the rules of a lane, as rules_of. `read`: what read_rules returned (nil: not read).
local function lane_rules(base, lane, read)
  if read and not read.named[lane] then
    return read.others
  end
  local kept = read and {} or redis.call('HMGET', base .. ':lanes:rules', rule_names(lane))
  for i, name in ipairs(read and {rule_names(lane)} or {}) do
    kept[i] = read.fields[name]
  end
  return rules_of(unpack(kept, 1, 7))
end

-- Returns when the task in front of a strict lane is due (ms since 1970; nil: none waits there; LATEST: it is suspended, so time alone
-- does not start it). References whose job does not wait there any more are passed over, as a start does, but no more than
-- PASSED_OVER.
local function front_due_at(base, lane, list)
  local due_at
  read_items(list, 0, true, 65536, function(item, passed)
    local id = job_id(item)
    local kept = id and own(redis.pcall('HMGET', base .. ':job:' .. id, 'state', 'lane', 'run_at')) or {}
    due_at = kept[2] == lane and (kept[1] == 'suspended' and LATEST
      or kept[1] == 'waiting' and whole_number(kept[3], 0, LATEST)) or nil
    return not due_at and passed < PASSED_OVER
  end)
  return due_at
end

-- Returns how many tasks of a lane may start now, and when more may, if only time makes room (ms since 1970; nil: something has
-- to end). Writes nothing. In a strict lane, the task in front may have to wait for its retry.
local function lane_room(base, lane, rules, list, now)
  local ends_at = rules.paused_until
  if ends_at == 0 or ends_at and ends_at > now then
    return 0, ends_at > 0 and ends_at or nil
  end
  local room, opens_at = math.huge, nil
  if rules.concurrency then
    room = math.max(0, rules.concurrency - whole_number(redis.call('HGET', base .. ':lanes:running', lane), 0))
  end
  local time_alone = room > 0
  for i = 1, #rules.rates, 2 do
    local rate, period = rules.rates[i], rules.rates[i + 1]
    local number, leaves_at = starts_within(base .. ':starts:' .. digits(period) .. ':' .. lane, period, now)
    if number >= rate then
      room, opens_at = 0, math.max(opens_at or 0, leaves_at or now)
    else
      room = math.min(room, rate - number)
    end
  end
  local run_at = rules.strict and room > 0 and front_due_at(base, lane, list)
  if run_at and run_at > now then
    return 0, run_at < LATEST and run_at or nil
  end
  return room, time_alone and opens_at or nil
end

-- Takes a lane out of the ring.
local function leave_ring(base, lane, weight)
  if redis.call('ZREM', base .. ':lanes:ring', lane) == 1 then
    add_to(base .. ':lanes', 'weights', -weight)
  end
end

-- Notes when time alone may let a lane start, and tells the leader if it is the first moment of the queue.
local function note_opening(base, lane, opens_at, now)
  local opens = base .. ':lanes:opens'
  redis.call('ZADD', opens, digits(opens_at), lane)
  if redis.call('ZRANGE', opens, 0, 0)[1] == lane then
    announce_moment(base, math.max(0, opens_at - now))
  end
end

-- Returns the key of the set that a lane is filed in (false: none) and its turn, which is that of the clock if none is remembered.
local function filed_in(base, lane, clock)
  for _, key in ipairs({base .. ':lanes:ring', base .. ':lanes:held', base .. ':lanes:idle'}) do
    local turn = redis.call('ZSCORE', key, lane)
    if turn then
      return key, tonumber(turn)
    end
  end
  return false, clock
end

-- Files a lane where it belongs: in the ring, held, or idle. A lane that enters the ring has the turn that is remembered of it,
-- or that of the clock if that is later. Returns whether it is in the ring, and whether it was not before. `rules`: as lane_rules
-- has returned them (nil: not read).
local function file_lane(base, lane, now, rules)
  local ring, held, names = base .. ':lanes:ring', base .. ':lanes:held', base .. ':lanes:names'
  local state = redis.call('HMGET', base .. ':lanes', 'epoch', 'clock')
  rules = rules or lane_rules(base, lane)
  local list, clock = lane_list(base, lane, state[1]), turn_number(state[2], 0)
  local before, turn = filed_in(base, lane, clock)
  local after, opens_at, room = turn > clock and base .. ':lanes:idle', nil, nil
  if lane_length(list) > 0 then
    room, opens_at = lane_room(base, lane, rules, list, now)
    after = room > 0 and ring or held
  end
  if opens_at then
    note_opening(base, lane, opens_at, now)
  end
  if after == before then
    return after == ring, false
  end
  if before == ring then
    leave_ring(base, lane, rules.weight)
  elseif before then
    redis.call('ZREM', before, lane)
  end
  if after then
    redis.call('ZADD', after, turn_text(math.max(clock, turn)), lane)
  end
  if after == ring then
    add_to(base .. ':lanes', 'weights', rules.weight)
  end
  if not room then
    redis.call('ZREM', names, lane)
    redis.call('HDEL', base .. ':lanes', 'gone:' .. lane)
  elseif before ~= ring and before ~= held then
    redis.call('ZADD', names, 0, lane)
  end
  return after == ring, after == ring
end

-- Puts an item at the back or the front of its lane. Returns 1 if a task of the lane may start now, else 0.
local function push_to_lane(base, lane, item, front, now)
  local lanes = base .. ':lanes'
  local list = lane_list(base, lane, redis.call('HGET', lanes, 'epoch'))
  local waited = lane_length(list)
  redis.call(front and 'RPUSH' or 'LPUSH', list, item)
  add_to(lanes, 'waiting', 1)
  if waited > 0 and not front then
    return redis.call('ZSCORE', base .. ':lanes:ring', lane) and 1 or 0
  end
  return file_lane(base, lane, now) and 1 or 0
end

-- Files a lane after `n` references were taken from its list. They do not count as references without a record any more.
local function take_from_lane(base, lane, n, now)
  if n > 0 then
    add_to(base .. ':lanes', 'waiting', -n)
    add_stale(base, -n)
    add_gone(base, lane, -n)
    file_lane(base, lane, now)
    drop_idle_lanes(base)
  end
end

-- Calls look(lane, list) for the lanes with tasks, by name, from `first` on (nil: from the first one on), until it returns false.
local function each_lane(base, first, look)
  local epoch, after = own(redis.pcall('HGET', base .. ':lanes', 'epoch')) or false, first and '[' .. first or '-'
  while after do
    local page = own(redis.pcall('ZRANGEBYLEX', base .. ':lanes:names', after, '+', 'LIMIT', 0, 100)) or {}
    for _, lane in ipairs(page) do
      if not look(lane, lane_list(base, lane, epoch)) then
        return
      end
    end
    after = #page == 100 and '(' .. page[100]
  end
end

-- Returns how many tasks of the lists may start now, as far as it is known: those of the queue's own list, the suspects, and
-- one of each lane in the ring.
local function startable_items(base)
  return redis.call('LLEN', base) + redis.call('LLEN', base .. ':suspects') + redis.call('ZCARD', base .. ':lanes:ring')
end

-- Returns the name of a lane that was cleared, and the key of its list, which is of the epoch before.
local function trashed_lane(base, trash)
  local lane, epoch = redis.call('ZRANGE', trash, 0, 0)[1], redis.call('HGET', base .. ':lanes', 'epoch')
  return lane, lane_list(base, lane, digits(whole_number(epoch, 1) - 1))
end

-- Deletes what is stored about lanes if none has a task or a claim.
local function drop_idle_lanes(base)
  local lanes = base .. ':lanes'
  if redis.call('EXISTS', base .. ':lanes:names', base .. ':lanes:running', base .. ':trash:lanes') == 0 then
    redis.call('DEL', lanes, base .. ':lanes:idle')
  end
end

-- Adds `changes`, numbers by lane, to the places that lanes have in use.
local function add_places(base, changes)
  local running, lanes, set, unused = base .. ':lanes:running', {}, {}, {}
  for lane in pairs(changes) do
    lanes[#lanes + 1] = lane
  end
  local used = redis.call('HMGET', running, unpack(lanes))
  for i, lane in ipairs(lanes) do
    local n = whole_number(used[i], 0) + changes[lane]
    if n > 0 then
      set[#set + 1], set[#set + 2] = lane, digits(n)
    elseif used[i] then
      unused[#unused + 1] = lane
    end
  end
  if #set > 0 then
    redis.call('HSET', running, unpack(set))
  end
  if #unused > 0 then
    redis.call('HDEL', running, unpack(unused))
  end
end

-- Frees the places that `entries` of `:lanes:claims` have in their lanes, at most 1,000. Returns how many lanes entered the ring.
-- A lane is filed only if its number of running tasks is limited: no other lane may start because a task has ended.
local function free_places(base, entries, now)
  local claims = base .. ':lanes:claims'
  local lanes, freed, gone = redis.call('HMGET', claims, unpack(entries)), {}, {}
  for i, entry in ipairs(entries) do
    local lane = lanes[i]
    if lane then
      freed[lane], gone[#gone + 1] = (freed[lane] or 0) - 1, entry
    end
  end
  if #gone == 0 then
    return 0
  end
  redis.call('HDEL', claims, unpack(gone))
  add_places(base, freed)
  local entered, read = 0, read_rules(base)
  for lane in pairs(freed) do
    local rules = lane_rules(base, lane, read)
    if rules.concurrency then
      local _, is_new = file_lane(base, lane, now, rules)
      entered = entered + (is_new and 1 or 0)
    end
  end
  drop_idle_lanes(base)
  return entered
end

-- Files the lane of a job that has left the queue without a run: it may have been a suspect that had its place already, or the
-- task that a strict lane waited for. Wakes a worker if the lane may start now.
local function job_left_lane(base, lane, id, now)
  local entered = free_places(base, {':' .. id}, now)
  if is_strict(base) then
    local _, is_new = file_lane(base, lane, now)
    entered = entered + (is_new and 1 or 0)
  end
  wake(base, entered)
end

-- Files lanes whose moment has come, and all lanes in turn after their rules have changed: each time up to `limit`, and no more
-- than FILED_AT_ONCE of each. Returns how many entered the ring.
local function open_lanes(base, limit, now)
  local opens, entered, most = base .. ':lanes:opens', 0, math.min(limit, FILED_AT_ONCE)
  local lanes = redis.call('ZRANGEBYSCORE', opens, '-inf', digits(now), 'LIMIT', 0, most)
  for _, lane in ipairs(lanes) do
    redis.call('ZREM', opens, lane)
    local ends_at = lane_rules(base, lane).paused_until
    if ends_at and ends_at > 0 and ends_at <= now then
      redis.call('HDEL', base .. ':lanes:rules', 'pause:' .. lane)
    end
  end
  local after = redis.call('HGET', base .. ':lanes', 'refile')
  after = after and (string.sub(after, 1, 1) == '(' and after or '-')
  local page = after and redis.call('ZRANGEBYLEX', base .. ':lanes:names', after, '+', 'LIMIT', 0, most) or {}
  for _, lane in ipairs(page) do
    lanes[#lanes + 1] = lane
  end
  if after and #page < most then
    redis.call('HDEL', base .. ':lanes', 'refile')
  elseif after then
    redis.call('HSET', base .. ':lanes', 'refile', '(' .. page[#page])
  end
  for _, lane in ipairs(lanes) do
    local _, is_new = file_lane(base, lane, now)
    entered = entered + (is_new and 1 or 0)
  end
  return entered
end

-- Files all lanes, because other rules hold: at once or, if they are many, in the next calls of start_tasks and promote_due.
local function refile_lanes(base, now)
  if redis.call('EXISTS', base .. ':lanes:names') == 1 then
    redis.call('HSET', base .. ':lanes', 'refile', '-')
    wake(base, open_lanes(base, FILED_AT_ONCE, now))
    announce_moment(base, 0)
  end
end

-- Pauses a lane until `ends_at` (ms since 1970, 0: until it is resumed).
local function pause_lane(base, lane, reason, ends_at, now)
  redis.call('HSET', base .. ':lanes:rules', 'pause:' .. lane, digits(ends_at) .. ' ' .. reason)
  file_lane(base, lane, now)
  if ends_at > 0 then
    note_opening(base, lane, ends_at, now)
  end
end

-- Pauses a lane for `ms`, unless it is paused for longer.
local function pause_lane_for(base, lane, reason, ms, now)
  local ends_at = lane_rules(base, lane).paused_until
  if not ends_at or ends_at > 0 and ends_at < now + ms then
    pause_lane(base, lane, reason, now + ms, now)
  end
end

-- True if the lanes of the queue are strict.
local function is_strict(base)
  return redis.call('HGET', base .. ':lanes:rules', 'declared strict')
end

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
local function leave_ring_together(base, turns, visits)
  local lanes, weights, empty, gone, held, idle = {}, 0, {}, {}, {}, {}
  for _, visit in ipairs(visits) do
    lanes[#lanes + 1], weights = visit.lane, weights + visit.rules.weight
    local kept = visit.left > 0 and held or visit.turn > turns.clock and idle
    if kept then
      kept[#kept + 1], kept[#kept + 2] = visit.turn, visit.lane
    end
    empty[#empty + 1], gone[#gone + 1] = visit.left == 0 and visit.lane or nil, visit.left == 0 and 'gone:' .. visit.lane or nil
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
    redis.call('HDEL', base .. ':lanes', unpack(gone))
  end
end

-- Gives claims (names and lanes in turn) their places, and counts the starts of the visited lanes.
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
local function visit_lane(start, turns, lane, turn)
  local visit, claims, before, skipped = visit_of(start, turns, lane), turns.claims, #start.mine, start.skipped
  local status, items, suspect = 'empty', 0, nil
  turns.next = turns.next + 1
  if visit.left > 0 then
    status, items, suspect = take(start, visit.list, math.min(turns.quantum, visit.room), lane, visit.rules.strict)
  end
  if start.skipped > skipped then
    add_gone(start.base, lane, skipped - start.skipped)
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
local function visit_main(start, turns)
  local before = #start.mine
  turns.main_waits = take(start, start.base, turns.quantum) ~= 'empty'
  local started = #start.mine - before
  turns.clock = turns.clock + started / math.max(1, turns.weights + 1)
  turns.main = turns.main + started
end

-- Takes tasks of the lanes in turn, and of the queue's own list, as many as the start may take. Returns `empty` if no task is left
-- that may start, `suspect` if a suspect has moved to the suspects, else `taken`.
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
local function move_place(base, lane, id, claim)
  redis.call('HDEL', base .. ':lanes:claims', ':' .. id)
  redis.call('HSET', base .. ':lanes:claims', claim, lane)
end

-- The rules of lanes: what workers declare and what an operator sets, how they are checked, and how a change takes effect.

local MAX_WEIGHT = 1000
local DECLARED_LANES = 1000 -- lanes that a worker may name

-- True if the value can be the weight of a lane.
local function is_weight(value)
  return type(value) == 'number' and value >= 1 and value <= MAX_WEIGHT and value == math.floor(value)
end

-- True if `named` has a value for each of at most DECLARED_LANES lanes that is_valid accepts.
local function are_named(named, is_valid)
  local n = 0
  for lane, value in pairs(type(named) == 'table' and named or {false}) do
    n = n + 1
    if not is_lane(lane) or not is_valid(value) then
      return false
    end
  end
  return n <= DECLARED_LANES
end

-- Returns what `packed` declares about lanes: msgpack of a map with `limit` (text, for each lane), `strict`, `weights` and
-- `limits` (by lane). Empty: nothing. Raises an error if it is something else.
local function declared_lanes(packed)
  local read, declared = pcall(cmsgpack.unpack, packed == '' and '\128' or packed)
  assert(read and type(declared) == 'table', 'lanes must be a msgpack map')
  local limit, strict = declared.limit or '', declared.strict
  assert(type(limit) == 'string' and are_limits(limit), 'the limit of lanes must be like 10 100/60000')
  assert(strict == nil or type(strict) == 'boolean', 'strict must be true or false')
  assert(are_named(declared.weights or {}, function(value)
    return is_weight(value)
  end), 'weights must be whole numbers of 1 to 1000, by lane')
  assert(are_named(declared.limits or {}, function(value)
    return type(value) == 'string' and are_limits(value)
  end), 'limits must be like 10 100/60000, by lane')
  return declared
end

-- Moves a lane from the ring to the held ones, before its weight changes.
local function hold_lane(base, lane)
  local turn = redis.call('ZSCORE', base .. ':lanes:ring', lane)
  if turn then
    leave_ring(base, lane, lane_rules(base, lane).weight)
    redis.call('ZADD', base .. ':lanes:held', turn, lane)
  end
end

-- True if `packed` differs from what the workers have declared.
local function declares_other_lanes(base, packed)
  return (redis.call('HGET', base .. ':lanes:rules', 'declared') or '') ~= packed
end

-- Stores what the workers declare about lanes. Returns true if it differs from what was stored.
local function declare_lanes(base, packed, now)
  local rules = base .. ':lanes:rules'
  if not declares_other_lanes(base, packed) then
    return false
  end
  local declared, weights, fields = declared_lanes(packed), {}, {}
  for lane, weight in pairs(declared.weights or {}) do
    weights[lane], fields['declared weight:' .. lane] = weight, digits(weight)
  end
  for lane, limit in pairs(declared.limits or {}) do
    fields['declared limit:' .. lane] = limit
  end
  fields.declared, fields['declared limit'] = packed ~= '' and packed or nil, declared.limit
  fields['declared strict'] = declared.strict and '1' or nil
  local kept = redis.call('HKEYS', rules)
  for _, field in ipairs(kept) do
    local lane = string.match(field, '^declared weight:(.*)$')
    if lane then
      weights[lane] = weights[lane] or 1
    end
  end
  for lane in pairs(weights) do
    hold_lane(base, lane)
  end
  for _, field in ipairs(kept) do
    if string.find(field, '^declared') then
      redis.call('HDEL', rules, field)
    end
  end
  for field, value in pairs(fields) do
    redis.call('HSET', rules, field, value)
  end
  refile_lanes(base, now)
  return true
end

-- Removes what workers have declared about lanes, because the last of them has left the queue. The next one declares it again.
local function forget_declared_lanes(base)
  local is_declared = redis.call('HEXISTS', base .. ':lanes:rules', 'declared') == 1
  if is_declared and redis.call('EXISTS', base .. ':workers') == 0 then
    declare_lanes(base, '', now_ms())
  end
end

-- Returns the limits that hold in a lane, as text. A strict lane runs one task at a time, whatever an operator has set.
local function limits_that_hold(rules)
  if not rules.strict then
    return rules.limits
  end
  local words = {'1'}
  for i = 1, #rules.rates, 2 do
    words[#words + 1] = digits(rules.rates[i]) .. '/' .. digits(rules.rates[i + 1])
  end
  return table.concat(words, ' ')
end

-- list_lanes: one page of the lanes with tasks, by name. The first page begins with lanes without tasks that run some, are paused
-- or have rules of an operator, at most as many as a page has.
-- ARGV[1] after name of the last lane of the page before, empty for the first page
-- ARGV[2] limit lanes
-- ARGV[3] only this lane, if it is one of those; empty: all
-- RETURNS ok lane... | more lane...; a lane is name, waiting, running, weight, limits (text), paused (false or the
--   reason), opens_in (ms until time lets it start, -1: not known), held (1: none of its tasks may start now)
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_lanes()
  local queue = KEYS[1]
  local after, limit, only = ARGV[1], tonumber(ARGV[2]), ARGV[3]
  local names, running, rules = queue .. ':lanes:names', queue .. ':lanes:running', queue .. ':lanes:rules'

  local reply, now = {'ok'}, now_ms()
  local epoch = own(redis.pcall('HGET', queue .. ':lanes', 'epoch')) or false
  local function list(lane)
    local of, tasks = tolerant(function() return lane_rules(queue, lane) end) or rules_of(), lane_list(queue, lane, epoch)
    local gone = whole_number(own(redis.pcall('HGET', queue .. ':lanes', 'gone:' .. lane)), 0)
    local waiting = math.max(0, (own(redis.pcall('LLEN', tasks)) or 0) - gone)
    local room, opens_at = tolerant(function() return lane_room(queue, lane, of, tasks, now) end)
    local paused = of.paused_until and (of.paused_until == 0 or of.paused_until > now) and of.reason or false
    reply[#reply + 1] = {lane, waiting, whole_number(own(redis.pcall('HGET', running, lane)), 0), of.weight,
      limits_that_hold(of), paused, opens_at and math.max(0, opens_at - now) or -1, room == 0 and 1 or 0}
  end

  if only ~= '' then
    local found = own(redis.pcall('ZSCORE', names, only)) or own(redis.pcall('HEXISTS', running, only)) == 1
    for _, setting in ipairs({'weight', 'limit', 'pause'}) do
      found = found or own(redis.pcall('HEXISTS', rules, setting .. ':' .. only)) == 1
    end
    if found then
      list(only)
    end
    return reply
  end
  if after == '' then
    local listed, others = {}, own(redis.pcall('HKEYS', running)) or {}
    for _, field in ipairs(own(redis.pcall('HKEYS', rules)) or {}) do
      others[#others + 1] = string.match(field, '^%l+:(.*)$')
    end
    for _, lane in ipairs(others) do
      if not listed[lane] and #reply <= limit and not own(redis.pcall('ZSCORE', names, lane)) then
        listed[lane] = true
        list(lane)
      end
    end
  end
  local page = own(redis.pcall('ZRANGEBYLEX', names, after == '' and '-' or '(' .. after, '+', 'LIMIT', 0, limit)) or {}
  for _, lane in ipairs(page) do
    list(lane)
  end
  reply[1] = #page == limit and 'more' or 'ok'
  return reply
end

-- set_lane: sets how a lane starts tasks, in place of what workers declare, or pauses it. Tasks that run continue. If tasks may
-- start now, workers are woken.
-- ARGV[4] lane name
-- ARGV[5] setting weight, limit, pause or resume
-- ARGV[6] value weight: a whole number of 1 to 1000; limit: text of limits.lua, empty for none; pause: the reason; * for what
--   workers declare
-- ARGV[7] duration ms after which a pause ends, - if it does not
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo a later change
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function set_lane()
  local queue = KEYS[1]
  local lane, setting, value, duration = ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])
  local rules = queue .. ':lanes:rules'

  local is_valid = setting == 'pause' or setting == 'resume' or value == '*'
    or setting == 'weight' and is_weight(tonumber(value)) or setting == 'limit' and are_limits(value)
  assert(is_lane(lane) and is_valid, 'a lane has no such setting')
  check_types(queue)
  check_lane_types(queue)
  local now = now_ms()
  hold_lane(queue, lane)
  if setting == 'pause' then
    pause_lane(queue, lane, value, duration and now + duration or 0, now)
  elseif setting == 'resume' then
    redis.call('HDEL', rules, 'pause:' .. lane)
  elseif value == '*' then
    redis.call('HDEL', rules, setting .. ':' .. lane)
  else
    redis.call('HSET', rules, setting .. ':' .. lane, value)
  end
  local _, is_new = file_lane(queue, lane, now)
  wake(queue, is_new and 1 or 0)
  return {'ok'}
end

-- cancel_lane: cancels the tasks of a lane in steps: those that are suspended, those that are due later, those that a run of their id blocks, those that
-- wait, and those that run.
-- ARGV[4] lane name
-- ARGV[5] after where the last step ended, a phase and its cursor; suspended 0 at first
-- ARGV[6] budget tasks to look at in one call
-- ARGV[7] reason text for callers that wait for a result
-- RETURNS ok waiting running after claim... | more (the same; call again with after) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function cancel_lane()
  local queue = KEYS[1]
  local lane, after, budget, reason = ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]
  local due, blocked, lane_claims = queue .. ':due', queue .. ':blocked', queue .. ':lanes:claims'
  local suspended = queue .. ':suspended'

  check_types(queue)
  check_lane_types(queue)
  local reply, ids, marked, now, ttl = {'more', 0, 0, after}, {}, {}, now_ms(), longest_result_ttl(queue)
  -- Cancels the job if it is of this lane and does not run. A reference may be to a job that was dispatched again, in another lane.
  local function cancel(id)
    local is_here = own(redis.pcall('HGET', queue .. ':job:' .. id, 'lane')) == lane
    if is_here and cancel_queued(queue, id, ttl, reason) == 1 then
      ids[#ids + 1] = id
    end
  end

  -- In this order, none that was there at the first step is missed: jobs become waiting, and then they run.
  local phase, cursor = string.match(after, '^(%l+) (%d+)$')
  for _, each in ipairs({'suspended', 'due'}) do
    if phase == each then
      local found = redis.call('ZSCAN', each == 'due' and due or suspended, cursor, 'COUNT', budget)
      for i = 1, #found[2], 2 do
        cancel(found[2][i])
      end
      phase, cursor = found[1] ~= '0' and phase or each == 'due' and 'blocked' or 'due', found[1]
    end
  end
  if phase == 'blocked' then
    local found = redis.call('SSCAN', blocked, cursor, 'COUNT', budget)
    for _, id in ipairs(found[2]) do
      cancel(id)
    end
    phase, cursor = found[1] == '0' and 'waiting' or phase, found[1]
  end
  if phase == 'waiting' then
    local list = lane_list(queue, lane, redis.call('HGET', queue .. ':lanes', 'epoch'))
    local items = lane_length(list) > 0 and redis.call('RPOP', list, budget) or {}
    for _, item in ipairs(items) do
      cancel(job_id(item) or '')
    end
    take_from_lane(queue, lane, #items, now)
    phase, cursor = #items < budget and 'claims' or phase, '0'
  end
  if phase == 'claims' then
    local found = redis.call('HSCAN', lane_claims, cursor, 'COUNT', budget)
    for i = 1, #found[2], 2 do
      local entry, of = found[2][i], found[2][i + 1]
      local suspect = string.match(entry, '^:(.*)$')
      if of == lane and suspect then
        cancel(suspect)
      elseif of == lane then
        local id = job_id(own(redis.pcall('LINDEX', queue .. ':claim:' .. entry, 0)) or '')
        local claim, worker = store_cancel_reason(queue, id or '', reason)
        marked[#marked + 1], marked[#marked + 2], reply[#reply + 1] = claim, worker, claim
      end
    end
    reply[1], cursor = found[1] == '0' and 'ok' or 'more', found[1]
  end
  request_cancels(queue, marked)
  count(queue, 'cancelled', #ids, ids)
  wake(queue, count_members(queue))
  give_room(queue)
  reply[2], reply[3], reply[4] = #ids, #marked / 2, phase .. ' ' .. cursor
  return reply
end
