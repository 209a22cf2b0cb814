-- Lanes: lines of jobs within a queue that take turns, each with a weight and limits of its own.
-- A lane with tasks is in the zset `:lanes:ring` if one of them may start, else in `:lanes:held`. A lane without tasks is in
-- `:lanes:idle` while it is remembered. All three are ordered by turn (_turns.lua). file_lane computes where a lane belongs, and
-- each script that may change this calls it, but for a start, which moves many lanes together. So a start reads only lanes of
-- which a task may start.
-- `:lanes:opens` has the moments (ms) at which time alone may let a lane start, and `:lanes:names` the lanes with tasks.
-- `:lanes:claims` has the lane of each claim, and of each suspect that waits (a colon and its id): it has its place already.
-- `:lanes:running` counts these for each lane. `:lane:EPOCH:LANE` is the list of a lane; a clearing begins a new epoch.
-- The hash `:lanes` has the epoch, how many references the lists have (`waiting`), and the state of the turns.
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

-- Returns the names of the fields of `:lanes:rules` that rule the lane, as rules_of takes their values.
-- LATER: most queues have no lanes.
local function rule_names(lane)
  return 'weight:' .. lane, 'declared weight:' .. lane, 'limit:' .. lane, 'declared limit:' .. lane, 'pause:' .. lane,
    'declared limit', 'declared strict'
end

-- Returns the rules of a lane: its weight, concurrency (false: none), rates (as limits_of), limits (both as text), whether it is
-- strict, and the end and the reason of its pause (nil: not paused).
-- LATER: most queues have no lanes.
local function rules_of(weight, declared_weight, limit, declared_limit, pause, limit_of_all, strict)
  local limits = limit or declared_limit or limit_of_all or ''
  local concurrency, rates = parsed_limits(limits)
  local ends_at, reason = string.match(pause or '', '^(%d+) (.*)$')
  return {weight = math.max(1, whole_number(weight or declared_weight, 1, MAX_WEIGHT)), limits = limits, concurrency = strict and 1 or concurrency,
    rates = rates, strict = strict and true, paused_until = ends_at and whole_number(ends_at, 0, LATEST), reason = reason}
end

-- Returns the rules of all lanes, for lane_rules: the `fields` that are stored, the lanes that they name, and the rules of all
-- `others`. Returns nil if there are too many fields to read them all.
-- LATER: most queues have no lanes.
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
-- LATER: most queues have no lanes.
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

-- Returns when the task in front of a strict lane is due (ms since 1970; nil: none waits there). References whose job does not wait
-- there any more are passed over, as a start does, but no more than PASSED_OVER.
-- LATER: few lanes are strict.
local function front_due_at(base, lane, list)
  local due_at
  read_items(list, 0, true, 65536, function(item, passed)
    local id = job_id(item)
    local kept = id and own(redis.pcall('HMGET', base .. ':job:' .. id, 'state', 'lane', 'run_at')) or {}
    due_at = kept[1] == 'waiting' and kept[2] == lane and whole_number(kept[3], 0, LATEST) or nil
    return not due_at and passed < PASSED_OVER
  end)
  return due_at
end

-- Returns how many tasks of a lane may start now, and when more may, if only time makes room (ms since 1970; nil: something has
-- to end). Writes nothing. In a strict lane, the task in front may have to wait for its retry.
-- LATER: most queues have no lanes.
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
    return 0, run_at
  end
  return room, time_alone and opens_at or nil
end

-- Takes a lane out of the ring.
-- LATER: most queues have no lanes.
local function leave_ring(base, lane, weight)
  if redis.call('ZREM', base .. ':lanes:ring', lane) == 1 then
    add_to(base .. ':lanes', 'weights', -weight)
  end
end

-- Notes when time alone may let a lane start, and tells the leader if it is the first moment of the queue.
-- LATER: most queues have no lanes.
local function note_opening(base, lane, opens_at, now)
  local opens = base .. ':lanes:opens'
  redis.call('ZADD', opens, digits(opens_at), lane)
  if redis.call('ZRANGE', opens, 0, 0)[1] == lane then
    announce_moment(base, math.max(0, opens_at - now))
  end
end

-- Returns the key of the set that a lane is filed in (false: none) and its turn, which is that of the clock if none is remembered.
-- LATER: most queues have no lanes.
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
-- LATER: most queues have no lanes.
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
  elseif before ~= ring and before ~= held then
    redis.call('ZADD', names, 0, lane)
  end
  return after == ring, after == ring
end

-- Puts an item at the back or the front of its lane. Returns 1 if a task of the lane may start now, else 0.
-- LATER: most queues have no lanes.
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
-- LATER: few lanes are cancelled.
local function take_from_lane(base, lane, n, now)
  if n > 0 then
    add_to(base .. ':lanes', 'waiting', -n)
    add_stale(base, -n)
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
-- LATER: most queues have no lanes.
local function startable_items(base)
  return redis.call('LLEN', base) + redis.call('LLEN', base .. ':suspects') + redis.call('ZCARD', base .. ':lanes:ring')
end

-- Returns the name of a lane that was cleared, and the key of its list, which is of the epoch before.
local function trashed_lane(base, trash)
  local lane, epoch = redis.call('ZRANGE', trash, 0, 0)[1], redis.call('HGET', base .. ':lanes', 'epoch')
  return lane, lane_list(base, lane, digits(whole_number(epoch, 1) - 1))
end

-- Deletes what is stored about lanes if none has a task or a claim.
-- LATER: most queues have no lanes.
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
-- LATER: most queues have no lanes.
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
-- LATER: most jobs are in no lane.
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
-- LATER: most queues have no lanes.
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
-- LATER: rules seldom change.
local function refile_lanes(base, now)
  if redis.call('EXISTS', base .. ':lanes:names') == 1 then
    redis.call('HSET', base .. ':lanes', 'refile', '-')
    wake(base, open_lanes(base, FILED_AT_ONCE, now))
    announce_moment(base, 0)
  end
end

-- Pauses a lane until `ends_at` (ms since 1970, 0: until it is resumed).
-- LATER: few lanes are paused.
local function pause_lane(base, lane, reason, ends_at, now)
  redis.call('HSET', base .. ':lanes:rules', 'pause:' .. lane, digits(ends_at) .. ' ' .. reason)
  file_lane(base, lane, now)
  if ends_at > 0 then
    note_opening(base, lane, ends_at, now)
  end
end

-- Pauses a lane for `ms`, unless it is paused for longer.
-- LATER: few lanes are paused.
local function pause_lane_for(base, lane, reason, ms, now)
  local ends_at = lane_rules(base, lane).paused_until
  if not ends_at or ends_at > 0 and ends_at < now + ms then
    pause_lane(base, lane, reason, now + ms, now)
  end
end

-- True if the lanes of the queue are strict.
-- LATER: most jobs are in no lane.
local function is_strict(base)
  return redis.call('HGET', base .. ':lanes:rules', 'declared strict')
end
