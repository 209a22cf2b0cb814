-- Limits: what may start in a queue, in the whole mesh. At most so many claims at once (the concurrency), at most so many
-- starts in any period of time (a rate), and nothing while the queue is paused.
-- The hash `:limits` has them as text, `declared` by the workers and `override` by an operator, which comes first: the
-- concurrency or -, then each rate as starts/period in ms, such as `10 100/60000 5/1000`. The set `:limited` has the claims that
-- count against the concurrency. The list `:starts:PERIOD` counts starts: each entry is a moment and a total, the newest first.
-- Whether a task may start is computed from these each time. Nothing records that a queue is full.

local PERIOD_PARTS = 1000 -- the precision of a rate: a start counts until up to a thousandth of the period longer

local MOST_STARTS = 9999999 -- what are_limits accepts
local LONGEST_PERIOD = 9999999999

-- Returns the limits in a text: the concurrency (false: none), and a table of rates and periods in turn.
local function parsed_limits(text)
  local rates = {}
  for rate, period in string.gmatch(text, '(%d+)/(%d+)') do
    local n = #rates
    rates[n + 1], rates[n + 2] = whole_number(rate, MOST_STARTS, MOST_STARTS), clamp(tonumber(period), 1, LONGEST_PERIOD)
  end
  return whole_number(string.match(text, '^%S+'), false, MOST_STARTS), rates
end

-- Returns the limits of the queue like parsed_limits, nil if it has none.
local function limits_of(base)
  local kept = redis.call('HMGET', base .. ':limits', 'override', 'declared')
  local text = kept[1] or kept[2]
  if not text or text == '' then
    return nil
  end
  return parsed_limits(text)
end

-- True if `text` is one that limits_of can read: at most four limits, without zeros.
local function are_limits(text)
  local words = 0
  for word in string.gmatch(text, '%S+') do
    local rate, period = string.match(word, '^([1-9]%d*)/([1-9]%d*)$')
    local known = rate and #rate <= 7 and #period <= 10
    if not (known or words == 0 and (word == '-' or #word <= 7 and string.find(word, '^[1-9]%d*$'))) then
      return false
    end
    words = words + 1
  end
  return words <= 5
end

-- Returns the moment and the total of an entry of `:starts:PERIOD`.
local function start_entry(entry)
  local moment, total = string.match(entry, '^(%d+) (%d+)$')
  return whole_number(moment, 0, LATEST), whole_number(total, 0)
end

-- Returns how many starts the last `period` ms had, when the oldest of them leaves the period (ms since 1970), and how many
-- entries are not needed any more. The newest entry that is older than the period is the one that totals are counted from. A key
-- of another type has counted no start: a queue may have one key for each lane, too many to look at before the first write.
local function starts_within(key, period, now)
  local before, passed, step = nil, 0, 2
  local entries = own(redis.pcall('LRANGE', key, -step, -1)) or {}
  while #entries > 0 do
    for i = #entries, 1, -1 do
      local moment, total = start_entry(entries[i])
      if before and moment > now - period then
        local _, newest = start_entry(redis.call('LINDEX', key, 0))
        return newest - before, moment + period, passed - 1
      end
      before, passed = total, passed + 1
    end
    step = 100
    entries = redis.call('LRANGE', key, -passed - step, -passed - 1)
  end
  return 0, nil, math.max(0, passed - 1)
end

-- Counts `n` starts at `now`. Moments are rounded up, so that a start never leaves the period early. A key of another type is
-- replaced.
local function add_starts(key, period, n, now)
  local _, _, unneeded = starts_within(key, period, now)
  if not own(redis.pcall('LLEN', key)) then
    redis.call('DEL', key)
  end
  if unneeded > 0 then
    redis.call('RPOP', key, unneeded)
  end
  local part = math.ceil(period / PERIOD_PARTS)
  local moment, last, total = math.ceil(now / part) * part, nil, 0
  local newest = redis.call('LINDEX', key, 0)
  if newest then
    last, total = start_entry(newest)
  else
    redis.call('LPUSH', key, '0 0')
  end
  if last and last >= moment then -- the same moment, or the clock was set back
    redis.call('LSET', key, 0, digits(last) .. ' ' .. digits(total + n))
    moment = last
  else
    redis.call('LPUSH', key, digits(moment) .. ' ' .. digits(total + n))
  end
  redis.call('PEXPIRE', key, period + math.max(0, moment - now))
end

-- Returns how many tasks may start now, and in how many ms more may, if only time makes room (nil: something has to end). Writes
-- nothing.
local function room_of(base, now)
  if redis.call('EXISTS', base .. ':paused') == 1 then
    local ends_in = redis.call('PTTL', base .. ':paused')
    return 0, ends_in >= 0 and ends_in or nil
  end
  local concurrency, rates = limits_of(base)
  if concurrency == nil then
    return math.huge
  end
  local room, opens_in = math.huge, nil
  if concurrency then
    room = math.max(0, concurrency - redis.call('SCARD', base .. ':limited'))
  end
  local time_alone = room > 0
  for i = 1, #rates, 2 do
    local rate, period = rates[i], rates[i + 1]
    local number, leaves_at = starts_within(base .. ':starts:' .. digits(period), period, now)
    if number >= rate then
      room, opens_in = 0, math.max(opens_in or 0, (leaves_at or now) - now)
    else
      room = math.min(room, rate - number)
    end
  end
  return room, time_alone and opens_in or nil
end

-- Tells the leader that tasks of the queue may start in `ms`: it runs promote_due then.
local function announce_moment(base, ms)
  redis.pcall('PUBLISH', '{' .. string.match(base, '^(.-):{') .. '}:due', digits(ms) .. ' ' .. base)
end

-- Tells the leader that tasks may start in `opens_in` ms. The moment of a rate is announced once.
local function announce_room(base, opens_in, now)
  local counts, moment = base .. ':counts', digits(now + opens_in)
  if redis.call('EXISTS', base .. ':paused') == 0 then
    if redis.call('HGET', counts, 'announced') == moment then
      return
    elseif redis.call('HSET', counts, 'announced', moment) == 1 then
      redis.call('EXPIRE', counts, COUNTS_EXPIRE)
    end
  end
  announce_moment(base, opens_in)
end

-- Pauses the queue for `ms`, unless it is paused for longer. Returns true if it was not paused.
local function pause_for(base, reason, ms)
  local left = redis.call('PTTL', base .. ':paused')
  if left == -1 or left >= ms then
    return false
  end
  redis.call('SET', base .. ':paused', reason, 'PX', digits(ms))
  announce_room(base, ms, now_ms())
  return left == -2
end

-- Returns how many of `n` tasks may start now. If none may and only a rate forbids it, this is announced to the leader. An error
-- (a key has a foreign type) counts as no room, because the script that wakes workers has written already.
local function startable(base, n)
  local now = now_ms()
  local room, opens_in
  if not pcall(function()
    room, opens_in = room_of(base, now)
  end) then
    return 0
  end
  if room == 0 and opens_in and redis.call('EXISTS', base .. ':paused') == 0 then
    announce_room(base, opens_in, now)
  end
  return math.min(n, room)
end

-- Returns how many tasks may start now in a queue with limits, for a worker that asks for `wanted`; false if the queue is paused
-- until it is resumed. If only time makes room, this is announced to the leader.
local function room_to_start(base, wanted, now)
  local room, opens_in = room_of(base, now)
  if opens_in and wanted > 0 then
    announce_room(base, opens_in, now)
  end
  if not opens_in and redis.call('EXISTS', base .. ':paused') == 1 then
    return false
  end
  return room
end

-- Counts the starts of `claims`. If a rate allows no more, announces to the leader when it will.
local function note_starts(base, claims, now)
  local concurrency, rates = limits_of(base)
  for i = 1, rates and #rates or 0, 2 do
    add_starts(base .. ':starts:' .. digits(rates[i + 1]), rates[i + 1], #claims, now)
  end
  for from = 1, concurrency and #claims or 0, 1000 do
    redis.call('SADD', base .. ':limited', unpack(claims, from, math.min(from + 999, #claims)))
  end
  if rates and #rates > 0 then
    startable(base, 1)
  end
end

-- Takes `claims` out of those that count, for the queue and for their lanes. Returns for how many waiting tasks there is room
-- because of it.
local function free_counted(base, claims)
  local entered = redis.call('EXISTS', base .. ':lanes:claims') == 1 and free_places(base, claims, now_ms()) or 0
  return math.max(entered, math.min(redis.call('SREM', base .. ':limited', unpack(claims)), startable_items(base)))
end

-- Takes ended `claims`, at most 1,000, out of those that count, if some do. Returns for how many waiting tasks there is room
-- because of it. `held`: 1 for each claim that the worker held, else 0 (nil: it held all of them).
local function free_room(base, claims, held)
  if redis.call('EXISTS', base .. ':limited', base .. ':lanes:claims') == 0 then
    return 0
  end
  local ended = {}
  for i, claim in ipairs(claims) do
    ended[#ended + 1] = not (held and held[i] == 0) and claim or nil
  end
  return #ended > 0 and free_counted(base, ended) or 0
end

-- Returns all claims that run.
local function running_claims(base)
  local found = {}
  for _, worker in ipairs(redis.call('HKEYS', base .. ':workers')) do
    for _, claim in ipairs(redis.call('SMEMBERS', base .. ':claims:' .. worker)) do
      found[#found + 1] = claim
    end
  end
  return found
end

-- Sets `field` of the limits, declared or override, to `text` (false: removes it). If another limit holds then, counts the
-- claims that run. Returns true if another holds. A key of a wrong type is an error before the first write.
local function store_limits(base, field, text)
  local key = base .. ':limits'
  local kept = redis.call('HMGET', key, 'override', 'declared')
  local before = kept[1] or kept[2] or ''
  kept[field == 'override' and 1 or 2] = text
  local after = kept[1] or kept[2] or ''
  local running = {}
  if after ~= before then
    check_types(base)
    running = string.find(after, '^%d') and running_claims(base) or running
  end
  if text then
    redis.call('HSET', key, field, text)
  else
    redis.call('HDEL', key, field)
  end
  if after == before then
    return false
  end
  redis.call('DEL', base .. ':limited')
  for from = 1, #running, 1000 do
    redis.call('SADD', base .. ':limited', unpack(running, from, math.min(from + 999, #running)))
  end
  wake(base, startable_items(base))
  return true
end

-- Removes the limits that workers have declared, because the last worker has left the queue: the next one declares them again.
-- What is counted of the starts stays.
local function forget_declared_limits(base)
  if redis.call('EXISTS', base .. ':limits') == 1 and redis.call('EXISTS', base .. ':workers') == 0 then
    store_limits(base, 'declared', false)
  end
end

-- Returns in how many ms a job of the set `due` is due, the time of a suspended job has come, a lane may start, or more of the `waiting` tasks may start; -1 if none of
-- these is known.
local function next_start_in(base, due, waiting, now)
  local first_due, first_lane = first_time(due), first_time(base .. ':lanes:opens')
  local first_end = first_time(base .. ':suspended')
  if first_end and first_end < math.min(first_due or LATEST, LATEST) then -- else it waits for no time
    first_due = first_end
  end
  local next_in = first_due and math.max(0, first_due - now)
  local refiled = redis.call('HGET', base .. ':lanes', 'refile')
  if first_lane or refiled then
    local opens_in = refiled and 0 or math.max(0, first_lane - now)
    next_in = math.min(opens_in, next_in or opens_in)
  end
  if waiting > 0 then
    local _, opens_in = room_of(base, now)
    next_in = opens_in and math.min(opens_in, next_in or opens_in) or next_in
  end
  return next_in or -1
end

-- set_limits: sets the limits of a queue in place of those that its workers declare, or removes them. Tasks that run continue. If
-- tasks may start now, workers are woken.
-- ARGV[4] limits text as above, empty: the queue has none, *: those that the workers declare
-- RETURNS ok changed: 1 if other limits hold now | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo a later change
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function set_limits()
  local queue = KEYS[1]
  local limits = ARGV[4]

  assert(limits == '*' or are_limits(limits), 'limits must be like 10 100/60000')
  check_types(queue)
  return {'ok', store_limits(queue, 'override', limits ~= '*' and limits) and 1 or 0}
end

-- Named limits: code of any program takes a permit before it calls a service, and gives it back after the call. `limit` is the base
-- of one of them. The hash `limit` has the `limits` as text, as the last program gave them. The set `:held` has the permits by the
-- time at which their lease ends, and the hash `:permits` what each was started with: its cost, then period and moment of each rate.
-- The set `:waiting` has the permits that callers wait for, by the time until which this is known; in `:permits`, ~ and how many
-- callers wait in that line, and since when. A window is the list `:moments:PERIOD`, the newest first, and the hash `:costs:PERIOD` with the cost of
-- each moment, and their `total`. `:turn` is the permit that has waited longest. No other permit is granted while it waits, so
-- a program that takes a permit again and again does not keep others from it.

local LONGEST_LEASE = 60000
local TURN_EXPIRE = 3000 -- a permit that waits asks every 2 s at most
local MOST_LISTED = 1000 -- callers that wait, of which the numbers are summed up
local NAMED_EXPIRE = 2592000

-- Returns the keys of a window.
local function window_keys(limit, period)
  return limit .. ':moments:' .. digits(period), limit .. ':costs:' .. digits(period)
end

-- Raises an error if a key of the limit has a wrong type.
local function check_permits(limit, rates)
  redis.call('ZCARD', limit .. ':held')
  redis.call('ZCARD', limit .. ':waiting')
  redis.call('HLEN', limit .. ':permits')
  redis.call('GET', limit .. ':turn')
  for i = 2, #rates, 2 do
    local moments, costs = window_keys(limit, rates[i])
    redis.call('LLEN', moments)
    redis.call('HLEN', costs)
  end
end

-- Adds `cost` to what was started at `moment`.
local function add_cost(costs, moment, cost)
  for _, field in ipairs({moment, 'total'}) do
    redis.call('HSET', costs, field, digits(math.max(0, whole_number(redis.call('HGET', costs, field), 0) + cost)))
  end
end

-- Forgets what has left the window. Returns in how many ms at most `budget` is left in it, 0 for now.
local function within_budget_in(limit, period, budget, now)
  local moments, costs = window_keys(limit, period)
  local oldest = redis.call('LINDEX', moments, -1)
  while oldest and whole_number(oldest, 0) <= now - period do
    add_cost(costs, oldest, -whole_number(redis.call('HGET', costs, oldest), 0))
    redis.call('HDEL', costs, oldest)
    redis.call('RPOP', moments)
    oldest = redis.call('LINDEX', moments, -1)
  end
  if not oldest then
    redis.call('DEL', costs)
  end
  local total, at, moment = whole_number(redis.call('HGET', costs, 'total'), 0), -1, now - period
  while oldest and total > budget do
    moment = whole_number(oldest, now)
    total = total - whole_number(redis.call('HGET', costs, oldest), 0)
    at = at - 1
    oldest = redis.call('LINDEX', moments, at)
  end
  return math.max(0, moment + period - now)
end

-- Counts `cost` at `now`, rounded up as in add_starts. Returns the moment.
local function spend(limit, period, cost, now)
  local moments, costs = window_keys(limit, period)
  local part = math.ceil(period / PERIOD_PARTS)
  local moment, newest = math.ceil(now / part) * part, whole_number(redis.call('LINDEX', moments, 0))
  if newest and newest >= moment then
    moment = newest
  else
    redis.call('LPUSH', moments, digits(moment))
  end
  add_cost(costs, digits(moment), cost)
  redis.call('PEXPIRE', moments, period + math.max(0, moment - now))
  redis.call('PEXPIRE', costs, period + math.max(0, moment - now))
  return moment
end

-- Forgets permits whose lease has ended, or was taken before the clock was set back, and callers that wait no longer.
local function drop_lapsed(limit, now)
  for _, key in ipairs({limit .. ':held', limit .. ':waiting'}) do
    for _, range in ipairs({{'-inf', digits(now)}, {digits(now + LONGEST_LEASE + 1), '+inf'}}) do
      local lapsed = redis.call('ZRANGE', key, range[1], range[2], 'BYSCORE', 'LIMIT', 0, 1000)
      if #lapsed > 0 then
        redis.call('ZREM', key, unpack(lapsed))
        redis.call('HDEL', limit .. ':permits', unpack(lapsed))
      end
    end
  end
end

-- Holds a permit for another `lease_ms`.
local function hold_permit(limit, permit, lease_ms, now)
  redis.call('ZADD', limit .. ':held', digits(now + lease_ms), permit)
  redis.call('PEXPIRE', limit .. ':held', LONGEST_LEASE)
  redis.call('PEXPIRE', limit .. ':permits', LONGEST_LEASE)
end

-- Returns in how many ms a permit of this cost may be granted, 0 for now, and true if it has to be the next one.
local function grantable_in(limit, permit, cost, concurrency, rates, now)
  local held, turn, waits = limit .. ':held', limit .. ':turn', 0
  for i = 1, #rates, 2 do
    waits = math.max(waits, within_budget_in(limit, rates[i + 1], rates[i] - cost, now))
  end
  local is_next = waits > 0
  if concurrency and redis.call('ZCARD', held) >= concurrency then
    waits, is_next = math.max(waits, (first_time(held) or now) - now, 1), true
  end
  local first, left = redis.call('GET', turn), redis.call('PTTL', turn)
  if first and first ~= permit and left > 0 and left <= TURN_EXPIRE then -- else another program has written it
    return math.max(waits, left), false
  end
  return waits, is_next
end

-- Grants a permit. If others had to wait for its turn, they are woken.
local function grant_permit(limit, permit, cost, lease_ms, rates, now)
  local record = {digits(cost)}
  for i = 2, #rates, 2 do
    record[i], record[i + 1] = digits(rates[i]), digits(spend(limit, rates[i], cost, now))
  end
  redis.call('HSET', limit .. ':permits', permit, table.concat(record, ' '))
  redis.call('ZREM', limit .. ':waiting', permit)
  hold_permit(limit, permit, lease_ms, now)
  if redis.call('GET', limit .. ':turn') == permit then
    redis.call('DEL', limit .. ':turn')
    redis.pcall('PUBLISH', limit .. ':free', '1')
  end
end

-- Returns since when a permit is waited for; nil if it is not.
local function waits_since(limit, permit)
  return whole_number(string.match(redis.call('HGET', limit .. ':permits', permit) or '', '^~%d+ (%d+)$'))
end

local MOST_COMPARED = 100 -- callers that wait, among which the next one is looked for

-- Returns the permit that has waited longest: `permit`, since `since`, or another one.
local function longest_waiting(limit, permit, since, now)
  for _, other in ipairs(redis.call('ZRANGE', limit .. ':waiting', '(' .. digits(now), '+inf', 'BYSCORE', 'LIMIT', 0, MOST_COMPARED)) do
    local waits = waits_since(limit, other)
    if waits and waits < since then
      permit, since = other, waits
    end
  end
  return permit
end

-- Notes that `waiting` callers wait for a permit, and for one that has to be the next one that it is.
local function await_permit(limit, permit, waiting, is_next, now)
  local since = waits_since(limit, permit) or now
  if is_next then
    redis.call('SET', limit .. ':turn', longest_waiting(limit, permit, since, now), 'PX', TURN_EXPIRE)
  end
  redis.call('HSET', limit .. ':permits', permit, '~' .. digits(waiting) .. ' ' .. digits(since))
  redis.call('ZADD', limit .. ':waiting', digits(now + TURN_EXPIRE), permit)
  redis.call('PEXPIRE', limit .. ':permits', LONGEST_LEASE)
  redis.call('PEXPIRE', limit .. ':waiting', LONGEST_LEASE)
end

-- take_permits: takes permits of a named limit, as many of them as all of its limits allow now. At most `concurrency` permits are
-- held, and in any period permits of at most `rate` are started, with their cost as it is known.
-- ARGV[1] limits text as above, empty: those that another program has given
-- ARGV[2] cost number of each, at least 0
-- ARGV[3] lease_ms ms, at most 60,000
-- ARGV[4] waiting number of callers that wait if none is granted, for people
-- ARGV[5..] permits text, drawn by the program, at most 1,000
-- RETURNS ok granted other | wait ms other | never most | unknown: granted: how many of them, from the first on; other: the limits that
--   these replace, or empty; ms after which to ask again; most: the largest cost that a rate allows
-- RESEND safe: a permit that is held is granted again and counted once. A copy after its end holds it for one lease
-- FLAGS allow-oom
-- GROUP permits
local function take_permits()
  local limit = KEYS[1]
  local limits, cost, lease_ms, waiting = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

  assert(limits == '' or are_limits(limits), 'limits must be like 10 100/60000')
  cost, lease_ms, waiting = whole_number(cost), whole_number(lease_ms, nil, LONGEST_LEASE), whole_number(waiting, 1)
  assert(cost and lease_ms, 'cost and lease_ms must be whole numbers')
  local kept, now = redis.call('HGET', limit, 'limits'), now_ms()
  limits = limits ~= '' and limits or kept
  if not limits or not are_limits(limits) then
    return {'unknown'}
  end
  local concurrency, rates = parsed_limits(limits)
  for i = 1, #rates, 2 do
    if cost > rates[i] then
      return {'never', digits(rates[i])}
    end
  end
  check_permits(limit, rates)
  redis.call('HSET', limit, 'limits', limits)
  redis.call('EXPIRE', limit, NAMED_EXPIRE)
  drop_lapsed(limit, now)
  local other, granted = kept and kept ~= limits and kept or '', 0
  for i = 5, #ARGV do
    local permit = ARGV[i]
    if not redis.call('ZSCORE', limit .. ':held', permit) then
      local waits, is_next = grantable_in(limit, permit, cost, concurrency, rates, now)
      if waits > 0 and granted == 0 then
        await_permit(limit, permit, waiting, is_next, now)
        return {'wait', digits(waits), other}
      elseif waits > 0 then
        break
      end
      grant_permit(limit, permit, cost, lease_ms, rates, now)
    end
    granted = granted + 1
  end
  return {'ok', granted, other}
end

-- return_permit: gives a permit back, or gives up waiting for it, and counts what it has used in place of its cost. Others that
-- wait are woken.
-- ARGV[1] permit text
-- ARGV[2] used number, empty: its cost
-- RETURNS ok | gone: it is not held, or its lease ended, and the cost stays as it was
-- RESEND safe: a permit that is not held changes nothing
-- FLAGS allow-oom
-- GROUP permits
local function return_permit()
  local limit = KEYS[1]
  local permit, used = ARGV[1], ARGV[2]

  assert(used == '' or is_digits(used), 'used must be a whole number')
  check_permits(limit, {})
  local cost, started = string.match(redis.call('HGET', limit .. ':permits', permit) or '', '^(%d+)(.*)$')
  if redis.call('GET', limit .. ':turn') == permit then
    redis.call('DEL', limit .. ':turn')
  end
  redis.call('HDEL', limit .. ':permits', permit)
  redis.call('ZREM', limit .. ':waiting', permit)
  local held = redis.call('ZREM', limit .. ':held', permit) == 1
  for period, moment in string.gmatch(used ~= '' and started or '', ' (%d+) (%d+)') do
    local _, costs = window_keys(limit, tonumber(period))
    if own(redis.pcall('HEXISTS', costs, moment)) == 1 then
      add_cost(costs, moment, tonumber(used) - whole_number(cost, 0))
    end
  end
  if held or cost then -- else it has only waited
    redis.pcall('PUBLISH', limit .. ':free', '1')
  end
  return {(held or cost) and 'ok' or 'gone'}
end

-- renew_permits: holds permits for another lease, also those whose lease has ended in an outage, because their code still runs.
-- ARGV[1] lease_ms ms, at most 60,000
-- ARGV[2..] permit text, at most 1,000
-- RETURNS ok
-- RESEND safe: a late copy holds a permit that was given back for one lease
-- FLAGS allow-oom
-- GROUP permits
local function renew_permits()
  local limit = KEYS[1]
  local lease_ms = ARGV[1]

  lease_ms = whole_number(lease_ms, nil, LONGEST_LEASE)
  assert(lease_ms, 'lease_ms must be a whole number up to 60000')
  check_permits(limit, {})
  for i = 2, #ARGV do
    local permit = ARGV[i]
    hold_permit(limit, permit, lease_ms, now_ms())
  end
  return {'ok'}
end

-- Returns what was started in the last `period` ms.
local function spent_within(limit, period, now)
  local moments, costs = window_keys(limit, period)
  local total, at = whole_number(own(redis.pcall('HGET', costs, 'total')), 0), -1
  local oldest = own(redis.pcall('LINDEX', moments, at))
  while oldest and whole_number(oldest, 0) <= now - period do
    total, at = total - whole_number(redis.call('HGET', costs, oldest), 0), at - 1
    oldest = redis.call('LINDEX', moments, at)
  end
  return oldest and math.max(0, total) or 0
end

-- look_at_limit: how much of a named limit is in use.
-- RETURNS ok limits held expired waiting used... | unknown: limits as text; held: permits; expired: of these, permits of programs that
--   have not renewed them in time, which are free; waiting: callers; used: the cost of what each rate has started in its period
-- RESEND safe: it only reads
-- FLAGS no-writes
local function look_at_limit()
  local limit = KEYS[1]

  local limits, now = own(redis.pcall('HGET', limit, 'limits')), now_ms()
  if not limits or not are_limits(limits) then
    return {'unknown'}
  end
  local held = own(redis.pcall('ZCARD', limit .. ':held')) or 0
  local alive = own(redis.pcall('ZCOUNT', limit .. ':held', '(' .. digits(now), digits(now + LONGEST_LEASE))) or 0
  local lines = own(redis.pcall('ZRANGE', limit .. ':waiting', '(' .. digits(now), '+inf', 'BYSCORE', 'LIMIT', 0, MOST_LISTED)) or {}
  local waiting = 0
  for _, permit in ipairs(lines) do
    local callers = own(redis.pcall('HGET', limit .. ':permits', permit)) or ''
    waiting = waiting + whole_number(string.match(callers, '^~(%d+)'), 0)
  end
  local _, rates = parsed_limits(limits)
  local reply = {'ok', limits, held, held - alive, waiting}
  for i = 1, #rates, 2 do
    reply[#reply + 1] = spent_within(limit, rates[i + 1], now)
  end
  return reply
end
