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
-- LATER: most workers declare nothing.
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
