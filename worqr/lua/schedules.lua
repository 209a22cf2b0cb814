-- Schedules: declare, list, tick, pause, override and drop them (registry), store them (registry and a queue), and fire them (a
-- queue).

-- A stored schedule has its call in the slot of its queue, and its times in the registry, under the same number. The registry
-- alone starts nothing, so the rights to a queue's keys decide who may schedule its calls.

-- While a schedule is stored, the registry's schedules do not expire; else `expire_s` after the last peer that declared one.
local function keep_schedules(mesh, expire_s)
  local stored = redis.call('ZCARD', mesh .. ':schedules_stored') > 0
  for _, key in ipairs({mesh .. ':schedules', mesh .. ':schedules_due', mesh .. ':schedules_seen'}) do
    if stored then
      redis.call('PERSIST', key)
    else
      redis.call('EXPIRE', key, expire_s)
    end
  end
end

local ROW = {'def ', 'last ', 'next ', 'fired ', 'owed ', 'over ', 'ver ', 'ran ', 'ended ', 'paused '}

-- Returns the facts `what` about the schedules `names`, one schedule after the other; false for each that is missing.
local function facts_of(schedules, what, names)
  local fields = {}
  for _, name in ipairs(names) do
    for _, fact in ipairs(what) do
      fields[#fields + 1] = fact .. name
    end
  end
  return redis.call('HMGET', schedules, unpack(fields))
end

-- Returns the `n`th part of a list that has `size` values of each.
local function part_of(values, size, n)
  local part, before = {}, size * (n - 1)
  for i = 1, size do
    part[i] = values[before + i]
  end
  return part
end

-- Returns the facts about a schedule, and its name.
local function schedule_row(mesh, name)
  local row = facts_of(mesh .. ':schedules', ROW, {name})
  row[#ROW + 1] = name
  return row
end

-- Returns the number and the definition of a stored schedule of this queue; nil if it is not stored.
local function stored_schedule(queue, name)
  return string.match(redis.call('HGET', queue .. ':schedules', name) or '', '^(%d+) (.*)$')
end

-- How the last run of each schedule of this queue ended, is in the hash `outcomes`. The job of a schedule is `cron:NAME`. Its end
-- writes the field NAME, if the queue knows the schedule: it has fired (`fired`), or it is stored. Both are deleted with
-- the schedule, so a run that ends later leaves nothing. Jobs with other ids cost the look at their ids.
-- The text has the outcome, when it ended (ms), for how many ms its last run ran (-1: it did not), and its nominal time (0: none);
-- then a line with the type of the error, and its message or the reason, at most 500 bytes.

local FIRED_EXPIRE = 604800 -- s: a week after the last firing of a schedule of the queue
local OUTCOMES_EXPIRE = 34560000 -- s: 400 days, because some schedules fire once a year
local FIRING = 'cron:' -- before the name of a schedule: the id of its job

-- Notes how the job `id` of a schedule ended. `claim`: of its last run (nil: it did not run). `nominal`: its scheduled_for.
-- A user who has no right to the keys notes nothing. Returns true if it is the job of a schedule that the queue knows.
local function note_outcome(base, id, outcome, claim, nominal, error_type, text)
  local name, outcomes = string.sub(id, 6), base .. ':outcomes'
  if permitted(redis.pcall('HEXISTS', base .. ':fired', name)) ~= 1
    and permitted(redis.pcall('HEXISTS', base .. ':schedules', name)) ~= 1 then
    return false
  end
  local now = now_ms()
  local began = math.floor(whole_number(claim, -1, NEVER) / 1000)
  local first = table.concat({outcome, digits(now), began < 0 and '-1' or digits(math.max(0, now - began)),
    digits(whole_number(nominal, 0))}, ' ')
  local kept = table.concat({first, string.gsub(truncated(error_type), '%c', ' '), truncated(text)}, '\n')
  if permitted(redis.pcall('HSET', outcomes, name, kept)) then
    redis.call('EXPIRE', outcomes, OUTCOMES_EXPIRE)
  end
  return true
end

-- Lets the end of the job `id` of a schedule be noted that may never have fired. It blocks no firing.
local function expect_outcome(base, id)
  local fired = base .. ':fired'
  if permitted(redis.pcall('HSETNX', fired, string.sub(id, 6), '0 hand')) then
    redis.call('EXPIRE', fired, FIRED_EXPIRE)
  end
end

-- Deletes what the queue knows of the firings of a schedule.
local function forget_firings(queue, name)
  own(redis.pcall('HDEL', queue .. ':fired', name))
  own(redis.pcall('HDEL', queue .. ':outcomes', name))
end

-- Deletes all facts about a schedule.
local function forget_schedule(mesh, name)
  for _, fact in ipairs({'def ', 'last ', 'next ', 'fired ', 'owed ', 'paused ', 'over ', 'ver ', 'when ', 'ran ', 'ended ',
    'own '}) do
    redis.call('HDEL', mesh .. ':schedules', fact .. name)
  end
  redis.call('ZREM', mesh .. ':schedules_due', name)
  redis.call('ZREM', mesh .. ':schedules_seen', name)
end

-- Returns the owner of a schedule that `owner` declares, and stores it if it is not `before`.
local function own_schedule(schedules, name, before, owner)
  local of = owner_after(before or nil, owner)
  if of and of ~= before then
    redis.call('HSET', schedules, 'own ' .. name, of)
  elseif before and not of then
    redis.call('HDEL', schedules, 'own ' .. name)
  end
  return of
end

-- True if a worker of a newer deploy than this one runs.
local function runs_newer(mesh, owner)
  local number, app = string.match(owner, '^(%d+) (.*)$')
  local _, highest = running_deploys(mesh)
  return number ~= '0' and highest and (highest[app] or 0) > tonumber(number)
end

-- declare_schedules: stores schedules of a worker. A new or changed one counts its firings from now on. An unchanged one
-- continues where it was, so that firings missed while no worker ran can be caught up. A pause stays. While a newer deploy runs, an
-- older one changes nothing of what it has declared.
-- ARGV[4] replace 1: change what another peer declared, 0: store only those that are missing
-- ARGV[5] expire_s s until all schedules of a mesh without peers are forgotten
-- ARGV[6] owner the deploy of the worker, 0 for none, and its application
-- ARGV[7..] names and definitions in turn
-- RETURNS ok name... (those that a program has stored: they stay as they are) | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not replace what a newer peer declared
-- NUMBERED
-- FLAGS allow-oom
local function declare_schedules()
  local mesh = KEYS[1]
  local replace, expire_s, owner = ARGV[4] == '1', ARGV[5], ARGV[6]
  local schedules, schedules_due = mesh .. ':schedules', mesh .. ':schedules_due'
  local schedules_seen = mesh .. ':schedules_seen'

  redis.call('ZCARD', schedules_due)
  redis.call('ZCARD', schedules_seen)
  redis.call('ZCARD', mesh .. ':schedules_stored')
  local now, led = now_ms(), digits(whole_number(redis.call('HGET', schedules, 'led'), 0))
  local reply, newer = {'ok'}, nil
  local function is_newest(of)
    if of and of ~= owner and newer == nil then
      newer = runs_newer(mesh, owner) or false -- once: it reads all workers
    end
    return not of or of == owner or not newer
  end
  local function declare(name, value)
    local kept = redis.call('HMGET', schedules, 'def ' .. name, 'paused ' .. name, 'ver ' .. name, 'own ' .. name)
    if kept[3] then
      reply[#reply + 1] = name
      return
    end
    local of = own_schedule(schedules, name, kept[4], owner)
    local changed = not kept[1] or replace and kept[1] ~= value and is_newest(of)
    if changed then
      redis.call('HSET', schedules, 'def ' .. name, value, 'last ' .. name, digits(now))
      redis.call('HDEL', schedules, 'next ' .. name, 'owed ' .. name)
    end
    if not kept[2] and (changed or not redis.call('ZSCORE', schedules_due, name)) then
      schedule_check(schedules_due, {digits(now), name})
    end
    redis.call('ZADD', schedules_seen, led, name)
  end

  for i = 7, #ARGV, 2 do
    local name, value = ARGV[i], ARGV[i + 1]
    declare(name, value)
  end
  store_clock(schedules, now)
  keep_schedules(mesh, expire_s)
  return reply
end

-- renew_schedules: notes that a worker still declares these schedules, and returns the names of those that are missing.
-- ARGV[1] expire_s s until all schedules of a mesh without peers are forgotten
-- ARGV[2] owner the deploy of the worker, 0 for none, and its application
-- ARGV[3..] names text
-- RETURNS ok name... (missing)
-- RESEND safe: a copy notes the same again; missing schedules stay missing
-- FLAGS allow-oom
local function renew_schedules()
  local mesh = KEYS[1]
  local expire_s, owner = ARGV[1], ARGV[2]
  local schedules, schedules_due = mesh .. ':schedules', mesh .. ':schedules_due'
  local schedules_seen = mesh .. ':schedules_seen'

  redis.call('ZCARD', schedules_due)
  redis.call('ZCARD', schedules_seen)
  local led, missing = digits(whole_number(redis.call('HGET', schedules, 'led'), 0)), {'ok'}
  for i = 3, #ARGV do
    local name = ARGV[i]
    local kept = redis.call('HMGET', schedules, 'def ' .. name, 'ver ' .. name, 'own ' .. name)
    if not kept[1] then
      missing[#missing + 1] = name
    elseif not kept[2] then
      own_schedule(schedules, name, kept[3], owner)
      redis.call('ZADD', schedules_seen, led, name)
      if not redis.call('ZSCORE', schedules_due, name) and redis.call('HEXISTS', schedules, 'paused ' .. name) == 0 then
        schedule_check(schedules_due, {digits(now_ms()), name})
      end
    end
  end
  keep_schedules(mesh, expire_s)
  return missing
end

-- list_schedules: one page of the facts about all schedules of the mesh, and the server's time. The facts about one schedule
-- may be spread over several pages, and may be repeated.
-- ARGV[1] cursor of the page before; 0 for the first
-- ARGV[2] budget, how many facts to return, approximately
-- RETURNS ok now_ms cursor fields: the cursor of the next page (0: this was the last), names and values in turn; a name is def,
--   last, next, fired, owed, over, paused, ver, when, ran or ended, a space, and the schedule's name
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_schedules()
  local mesh = KEYS[1]
  local cursor, budget = ARGV[1], ARGV[2]
  local schedules = mesh .. ':schedules'

  local page = redis.call('HSCAN', schedules, cursor, 'COUNT', budget)
  return {'ok', digits(now_ms()), page[1], page[2]}
end

-- list_due_schedules: one page of the names of schedules that a leader is to look at now, in the order of their times.
-- ARGV[1] skip, how many to leave out
-- ARGV[2] limit, how many to return at most
-- RETURNS ok name...
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_due_schedules()
  local mesh = KEYS[1]
  local skip, limit = ARGV[1], ARGV[2]

  local found = redis.call('ZRANGEBYSCORE', mesh .. ':schedules_due', '-inf', digits(now_ms()), 'LIMIT', skip, limit)
  table.insert(found, 1, 'ok')
  return found
end

local ENDED_KEPT = 604800000 -- ms for which a schedule that has ended is shown: a week

local AT_ONCE = 25 -- schedules that one command reads or stores, because commands take most of a script's time
local NOTED = {'def ', 'last ', 'owed ', 'paused ', 'ver '}

-- Notes how far the schedule `name` got, if it is as its leader read it: `was` and `is` as in tick_schedules, `kept` its facts
-- NOTED. What is to be stored is added to `facts` and `checks`.
local function note_schedule(schedules, now, name, was, is, kept, facts, checks)
  local def, last_before, owed_before, paused, ver = unpack(kept)
  local last, next_ms, at, fired, more, owed = string.match(is, '^(%d+) (%d*) (%d+) (%d*) (%d*) (.*)$')
  local found = (last_before or '') .. '\n' .. (owed_before or '') .. (ver and '\n' .. ver or '')
  if not def or found ~= was or tonumber(last) > now + AHEAD_MS then
    return
  end
  local function store(fact, value)
    facts[#facts + 1], facts[#facts + 2] = fact .. name, value
  end
  store('last ', last)
  for what, value in pairs({['next '] = next_ms, ['owed '] = owed, ['fired '] = fired}) do
    if value ~= '' then
      store(what, value)
    end
  end
  if more ~= '' then
    add_to(schedules, 'ran ' .. name, more)
  end
  if at == '0' then
    store('ended ', digits(now))
    at = digits(now + ENDED_KEPT)
  end
  if owed_before and owed == '' then
    redis.call('HDEL', schedules, 'owed ' .. name)
  end
  if not paused then
    checks[#checks + 1], checks[#checks + 2] = at, name
  end
end

-- Stores how far schedules got. `ticks`: name, `was` and `is` of each, as in tick_schedules. Of one that is there twice, the first
-- counts.
local function note_schedules(schedules, schedules_due, now, ticks)
  local noted = {}
  for from = 1, #ticks, AT_ONCE do
    local names, facts, checks = {}, {}, {}
    for n = from, math.min(from + AT_ONCE - 1, #ticks) do
      names[#names + 1] = ticks[n][1]
    end
    local kept = facts_of(schedules, NOTED, names)
    for n, name in ipairs(names) do
      local tick = ticks[from + n - 1]
      if not noted[name] then
        noted[name] = true
        note_schedule(schedules, now, name, tick[2], tick[3], part_of(kept, #NOTED, n), facts, checks)
      end
    end
    if facts[1] then
      redis.call('HSET', schedules, unpack(facts))
      schedule_check(schedules_due, checks)
    end
  end
end

-- Adds the rows of the schedules `names` to the `reply` of tick_schedules, at most MAX_BYTES of definitions and one. `asked`: only
-- those that are due.
local function add_due_rows(schedules, schedules_due, now, names, asked, reply)
  local bytes, MAX_BYTES = 0, 1048576
  for from = 1, #names, AT_ONCE do
    local some = {}
    for n = from, math.min(from + AT_ONCE - 1, #names) do
      some[#some + 1] = names[n]
    end
    local kept = facts_of(schedules, ROW, some)
    for n, name in ipairs(some) do
      local row = part_of(kept, #ROW, n)
      if not row[1] or row[10] then -- gone or paused: not in the set of due schedules
        redis.call('ZREM', schedules_due, name)
      elseif not asked or tonumber(redis.call('ZSCORE', schedules_due, name) or NEVER) <= now then
        row[10], reply[#reply + 1], bytes = name, row, bytes + #row[1]
        if bytes > MAX_BYTES then
          return
        end
      end
    end
  end
end

-- tick_schedules: stores how far schedules got, each only if it is as its leader read it: a concurrent declaration, resume or
-- tick wins. Then returns the schedules that a leader is to look at now.
-- ARGV[1] limit, how many due schedules to return at most
-- ARGV[2] was_led ms for which the mesh was led, as the leader read it before
-- ARGV[3] led ms, the same and the time since
-- ARGV[4] wanted a msgpack list of the names of schedules to return, if they are due; empty: those that are due first
-- ARGV[5..] names of the schedules to note, each with where it was found (last, a line break, owed...; of a stored one a line
--   break and ver), and where it is now:
--   last, next (empty: as it was), look_at (0: it has ended), fired (likewise: the last firing that was enqueued), how many more
--   have run (likewise), owed..., each after a space
-- RETURNS ok now_ms led next_ms due row... | back (the clock was set back: call rewind_schedules first); next_ms: when the next
--   one is due, or empty; due: how many are due; a row is definition, last, next, fired, owed, over, ver, ran, ended (each may be
--   missing) and name
-- RESEND safe: a copy finds the schedule as it stored it, or changed by another process
-- FLAGS allow-oom
local function tick_schedules()
  local mesh = KEYS[1]
  local limit, was_led, led, wanted = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
  local schedules, schedules_due = mesh .. ':schedules', mesh .. ':schedules_due'

  redis.call('ZCARD', schedules_due)
  local now = now_ms()
  if redis.call('HLEN', schedules) == 0 then
    return {'ok', digits(now), '0', '', 0}
  elseif clock_was_set_back(schedules, now) then
    return {'back'}
  end
  store_clock(schedules, now)
  local stored_led = digits(whole_number(redis.call('HGET', schedules, 'led'), 0))
  if was_led ~= led and stored_led == was_led then
    redis.call('HSET', schedules, 'led', led)
  end

  local ticks = {}
  for i = 5, #ARGV, 3 do
    local name, was, is = ARGV[i], ARGV[i + 1], ARGV[i + 2]
    ticks[#ticks + 1] = {name, was, is}
  end
  note_schedules(schedules, schedules_due, now, ticks)
  local asked = wanted ~= '' and cmsgpack.unpack(wanted)
  local reply = {'ok', digits(now), digits(whole_number(redis.call('HGET', schedules, 'led'), 0)), '', 0}
  local names = asked or redis.call('ZRANGEBYSCORE', schedules_due, '-inf', digits(now), 'LIMIT', 0, limit)
  add_due_rows(schedules, schedules_due, now, names, asked, reply)
  local following = redis.call('ZRANGEBYSCORE', schedules_due, '(' .. digits(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  reply[4] = following[2] and digits(math.min(tonumber(following[2]), LATEST)) or ''
  reply[5] = redis.call('ZCOUNT', schedules_due, '-inf', digits(now))
  return reply
end

-- rewind_schedules: after the server's clock was set back, lets every schedule with a time in the future continue from now.
-- Handles one page; the last page stores that it is done.
-- ARGV[1] cursor of the page before; 0 for the first
-- ARGV[2] budget, how many schedules to look at, approximately
-- RETURNS ok cursor (of the next page; 0: it is done) rewound, how many
-- RESEND safe: a copy finds no schedule in the future
-- FLAGS allow-oom
local function rewind_schedules()
  local mesh = KEYS[1]
  local cursor, budget = ARGV[1], ARGV[2]
  local schedules, schedules_due = mesh .. ':schedules', mesh .. ':schedules_due'

  redis.call('ZCARD', schedules_due)
  local now, rewound = now_ms(), 0

  local function ahead(ms)
    return (tonumber(ms) or 0) > now + AHEAD_MS
  end

  local function rewind(name, last)
    local kept = redis.call('HMGET', schedules, 'next ' .. name, 'owed ' .. name, 'paused ' .. name)
    local at = redis.call('ZSCORE', schedules_due, name)
    local put_off = ahead(at) and tonumber(at) ~= tonumber(kept[1])
    if ahead(last) then
      local owed = {} -- without firings whose time comes again: they would be owed twice
      for nominal in string.gmatch(kept[2] or '', '%d+') do
        owed[#owed + 1] = tonumber(nominal) <= now and nominal or nil
      end
      redis.call('HSET', schedules, 'last ' .. name, digits(now), 'owed ' .. name, table.concat(owed, ' '))
      redis.call('HDEL', schedules, 'next ' .. name)
    end
    if (ahead(last) or put_off) and not kept[3] then
      schedule_check(schedules_due, {digits(now), name})
    end
    rewound = rewound + (ahead(last) and 1 or 0)
  end

  local page = redis.call('HSCAN', schedules, cursor, 'MATCH', 'last *', 'COUNT', budget)
  for i = 1, #page[2], 2 do
    rewind(string.sub(page[2][i], 6), page[2][i + 1])
  end
  if page[1] == '0' and redis.call('HLEN', schedules) > 0 then
    redis.call('HSET', schedules, 'clock', digits(now))
  end
  return {'ok', page[1], rewound}
end

-- pause_schedule: pauses a schedule, or resumes it from now on; firings missed while it was paused are not caught up.
-- ARGV[4] name of the schedule
-- ARGV[5] paused 1 or 0
-- RETURNS ok | unknown | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo what came after it
-- NUMBERED
-- FLAGS allow-oom
local function pause_schedule()
  local mesh = KEYS[1]
  local name, paused = ARGV[4], ARGV[5]
  local schedules, schedules_due = mesh .. ':schedules', mesh .. ':schedules_due'

  redis.call('ZCARD', schedules_due)
  if redis.call('HEXISTS', schedules, 'def ' .. name) == 0 then
    return {'unknown'}
  end
  if paused == '1' then
    redis.call('HSET', schedules, 'paused ' .. name, '1')
    redis.call('ZREM', schedules_due, name)
  elseif redis.call('HDEL', schedules, 'paused ' .. name) == 1 then
    local now = now_ms()
    redis.call('HSET', schedules, 'last ' .. name, digits(now))
    redis.call('HDEL', schedules, 'next ' .. name, 'owed ' .. name)
    schedule_check(schedules_due, {digits(now), name})
    store_clock(schedules, now)
  end
  return {'ok'}
end

-- override_schedule: gives a schedule other times than its definition, or lets it return to those of its definition. Firings
-- count from now on. Declarations do not change an override; a pause stays.
-- ARGV[4] name of the schedule
-- ARGV[5] override bytes; empty: return to the definition
-- RETURNS ok | same (it is so already) | unknown | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not undo what came after it
-- NUMBERED
-- FLAGS allow-oom
local function override_schedule()
  local mesh = KEYS[1]
  local name, override = ARGV[4], ARGV[5]
  local schedules, schedules_due = mesh .. ':schedules', mesh .. ':schedules_due'

  redis.call('ZCARD', schedules_due)
  local kept = redis.call('HMGET', schedules, 'def ' .. name, 'over ' .. name, 'last ' .. name, 'paused ' .. name)
  if not kept[1] then
    return {'unknown'}
  elseif (kept[2] and string.match(kept[2], '^%d+ (.*)$') or '') == override then
    return {'same'}
  end
  local now = now_ms()
  local from = digits(now)
  if kept[3] == from then
    from = digits(now + 1) -- a leader that read it within this millisecond must not store the plan of before
  end
  redis.call('HSET', schedules, 'last ' .. name, from)
  redis.call('HDEL', schedules, 'next ' .. name, 'owed ' .. name)
  if override == '' then
    redis.call('HDEL', schedules, 'over ' .. name)
  else
    redis.call('HSET', schedules, 'over ' .. name, digits(now) .. ' ' .. override)
  end
  if not kept[4] then
    schedule_check(schedules_due, {digits(now), name})
  end
  store_clock(schedules, now)
  return {'ok'}
end

-- drop_schedules: deletes schedules that no worker has declared while the mesh was led for unseen_ms. Time without a leader, or
-- in which the leader was suspended, does not count, and the server's clock does not matter.
-- ARGV[1] unseen_ms ms
-- ARGV[2] limit, how many at most
-- RETURNS ok name definition...: in turn
-- RESEND safe: a copy drops only what no worker has declared meanwhile
-- FLAGS allow-oom
local function drop_schedules()
  local mesh = KEYS[1]
  local unseen_ms, limit = tonumber(ARGV[1]), ARGV[2]
  local schedules, schedules_due = mesh .. ':schedules', mesh .. ':schedules_due'
  local schedules_seen = mesh .. ':schedules_seen'

  redis.call('ZCARD', schedules_due)
  local stored = redis.call('ZCARD', mesh .. ':schedules_stored')
  local led = whole_number(redis.call('HGET', schedules, 'led'), 0)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', schedules_seen, '(' .. digits(led), '+inf', 'LIMIT', 0, limit)) do
    redis.call('ZADD', schedules_seen, digits(led), name) -- declared before the led time was lost
  end
  local reply = {'ok'}
  local before = digits(led - unseen_ms)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', schedules_seen, '-inf', before, 'LIMIT', 0, limit)) do
    reply[#reply + 1], reply[#reply + 2] = name, redis.call('HGET', schedules, 'def ' .. name) or ''
    forget_schedule(mesh, name)
  end
  if #reply > 1 and redis.call('ZCARD', schedules_seen) == 0 and stored == 0 then
    redis.call('DEL', schedules, schedules_due) -- 'led' and 'clock'
  end
  return reply
end

-- drop_outdated_schedules: deletes declared schedules whose owner is outdated, of one page.
-- ARGV[1] from, how many of the declared ones to leave out
-- ARGV[2] limit, how many to look at
-- RETURNS ok next name definition...: in turn; next: where the next page begins, -1: there is none
-- RESEND safe: a copy drops nothing that a worker has declared meanwhile, because that worker is registered
-- FLAGS allow-oom
local function drop_outdated_schedules()
  local mesh = KEYS[1]
  local from, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
  local schedules, schedules_seen = mesh .. ':schedules', mesh .. ':schedules_seen'

  redis.call('ZCARD', mesh .. ':schedules_due')
  local lowest, reply = running_deploys(mesh), {'ok', -1}
  local names = lowest and redis.call('ZRANGE', schedules_seen, from, from + limit - 1) or {}
  for _, name in ipairs(names) do
    local kept = redis.call('HMGET', schedules, 'own ' .. name, 'def ' .. name)
    if is_outdated(kept[1], lowest) then
      reply[#reply + 1], reply[#reply + 2] = name, kept[2] or ''
      forget_schedule(mesh, name)
    end
  end
  if #names == limit then
    reply[2] = from + limit - (#reply - 2) / 2
  end
  return reply
end

-- Returns the meta (JSON, or nil) of a call and that of its firing as one.
local function joined_meta(of_call, of_firing)
  return of_call and of_firing and string.sub(of_call, 1, -2) .. ',' .. string.sub(of_firing, 2) or of_call or of_firing
end

-- Returns the options and the task of a stored schedule that a leader has read under the number `version`, with `meta` (JSON, or
-- nil) added to its own. Returns nil and why, if it has been changed.
local function stored_call(queue, name, version, meta)
  local number, definition = stored_schedule(queue, name)
  if number ~= version then
    return nil, number and 'stale' or 'gone'
  end
  local length, size, rest = string.match(definition, '^(%d+) (%d+) (.*)$')
  local is_read, options = pcall(cmsgpack.unpack, length and string.sub(rest, 1, length) or '')
  local task = length and string.sub(rest, length + 1, length + size)
  if not is_read or invalid_job(options, task) then
    return nil, 'broken'
  end
  options.meta = joined_meta(options.meta, meta)
  return options, task
end

-- Returns the options and the task of a firing. Returns nil and why, if the call that is stored has been changed.
local function fired_call(queue, o, task)
  if o.version then
    return stored_call(queue, o.name, o.version, o.meta)
  end
  local options = o.options and not invalid_job(o.options, task) and o.options or {}
  options.meta, options.workflow, options.lifetime = joined_meta(options.meta, o.meta), o.workflow, o.lifetime
  return options, task
end

-- Enqueues a job that waits for its retry. Returns how many tasks more can start.
local function hurry_retry(queue, id, now)
  redis.call('ZREM', queue .. ':due', id)
  redis.call('HSET', queue .. ':job:' .. id, 'run_at', digits(now))
  return enqueue_job(queue, id, now, now)
end

-- Returns the word for a firing that was judged before; nil for a new one.
local function judged_before(queue, batch, o, mark)
  local before = batch.judged[o.name] or redis.call('HGET', queue .. ':fired', o.name) or ''
  local last, status, marked = string.match(before, '^(%d+) (%a+)( ?%x*)$')
  last = tonumber(last)
  if last == o.nominal then
    return status == 'ok' and marked ~= mark and 'again' or status
  elseif last and o.nominal < last and last <= batch.judged_at + AHEAD_MS then
    return 'fired'
  end
  return nil
end

local UNSERVED = 86400000 -- ms, a day: queues whose workers start with the work have none in between

-- Returns the time (ms as text) of the job of a schedule that has waited for over a day in a queue that no worker serves now; else
-- ''. A run that was missed and made up for has waited since it was enqueued: its number is the microsecond of that.
local function unserved_since(queue, name, now)
  if permitted(redis.pcall('HLEN', queue .. ':workers')) ~= 0 then
    return ''
  end
  local kept = permitted(redis.pcall('HMGET', queue .. ':job:' .. FIRING .. name, 'state', 'run_at', 'started', 'first')) or {}
  local run_at = whole_number(kept[2], now)
  local since = math.max(run_at, (tonumber(kept[4]) or 0) / 1000)
  return kept[1] == 'waiting' and not kept[3] and now - since >= UNSERVED and digits(run_at) or ''
end

-- Returns the word for a firing that finds an earlier one; nil if it takes its place.
local function word_behind(queue, o, now)
  if o.overlap == 'queue' then
    return unserved_since(queue, o.name, now) == '' and 'busy' or 'skipped'
  end
  return o.overlap == 'skip' and 'skipped' or nil
end

-- Enqueues one firing. `o` has its name, nominal, run_at, overlap, meta, version, workflow, lifetime and options; `batch` what
-- fire_schedules knows of the queue. Returns its word.
local function fire_one(queue, batch, o, task)
  local options
  options, task = fired_call(queue, o, task)
  if not options then
    return task
  end
  local mark = o.meta and ' ' .. redis.sha1hex(o.meta) or '' -- whose job it is, for two leaders that trace the same firing
  local status = judged_before(queue, batch, o, mark)
  if status then
    return status
  end
  local id, now = FIRING .. o.name, batch.now
  local seen = find_job(queue, id, batch.cleared)
  local kept = seen.job and redis.call('HMGET', queue .. ':job:' .. id, 'scheduled_for', 'retried_at') or {}
  local nominal_before, retried_at = whole_number(kept[1], 0), whole_number(kept[2], 0)
  local earlier = seen.active or seen.job and nominal_before <= batch.judged_at + AHEAD_MS
  if earlier and o.overlap ~= 'cancel' and seen.job and seen.job.state == 'due' and retried_at > now + AHEAD_MS then
    batch.ready = batch.ready + hurry_retry(queue, id, now)
  end
  status = earlier and word_behind(queue, o, now) or 'ok'
  if status == 'busy' then
    return status
  end
  if status == 'ok' then
    if seen.active then
      cancel_running(queue, id, 'the next firing of its schedule came')
      seen.begun = nil
    end
    batch.used = batch.used + 1
    options.id, options.run_at, options.scheduled_for = id, math.min(o.run_at, LATEST), digits(o.nominal)
    options.exists = seen.begun and o.overlap == 'cancel' and 'cancel' or options.exists
    local _, _, _, ready, created = upsert(queue, options, task, digits(batch.first + batch.used - 1), now, seen)
    batch.ready, batch.created = batch.ready + ready, batch.created + created
    batch.ids[#batch.ids + 1] = created == 1 and id or nil
  end
  batch.judged[o.name] = digits(o.nominal) .. ' ' .. status .. (status == 'ok' and mark or '')
  return status
end

-- fire_schedules: enqueues firings of schedules of a queue as jobs cron:NAME, each once, however often it is called. Firings of a
-- schedule come in the order of their nominal times: a firing older than the last one is skipped. A last firing more than a
-- minute ahead of the clock was fired while the clock was wrong. It blocks no later firing, and its job, if it did not begin, is
-- replaced. A retry whose delay was counted from such a time does not block the schedule either: it is due now.
-- ARGV[1] judged_at ms, the registry's clock when the leader found them due (the queue may lie on another server)
-- ARGV[2] expire_s s that the last firings of the queue's schedules are remembered
-- ARGV[3..] firings at most 500: a msgpack map of name of the schedule, nominal ms, run_at ms, overlap when the job of an earlier
--   firing is still there (skip, queue, or cancel: one that does not run is replaced), meta of the job (JSON), version, the number of
--   one that is stored in the queue, of a call of a workflow workflow and lifetime (ms as text), and options of a job, as those of
--   dispatch_jobs; and task bytes (of a stored one: none), in turn
-- RETURNS ok | skipped (an earlier firing waits or runs; with queue, it has waited for over a day, and no worker serves the queue) |
--   busy (the same; nothing was done, try again) | fired (a later firing was judged before) | again (this firing was enqueued
--   before, with another meta) | gone (it is not stored) | stale (it is stored under another number) | broken (what is stored
--   cannot be read): one of them for each firing, in turn
-- RESEND safe: fenced by the nominal time; an equal one gets the same answer again, and nothing happens
-- GROUP makes
local function fire_schedules()
  local queue = KEYS[1]
  local judged_at, expire_s = tonumber(ARGV[1]), ARGV[2]
  local fired = queue .. ':fired'

  check_types(queue)
  redis.call('HLEN', fired)
  local first, now = next_token(queue)
  local batch = {judged_at = judged_at, now = now, first = first, used = 0, judged = {}, ids = {}, ready = 0, created = 0,
    cleared = redis.call('HMGET', queue .. ':counts', 'cleared', 'cleared_why')}
  local reply, flat = {}, {}
  local done, problem = pcall(function()
    for i = 3, #ARGV, 2 do
      local firing, task = ARGV[i], ARGV[i + 1]
      reply[#reply + 1] = fire_one(queue, batch, cmsgpack.unpack(firing), task)
    end
  end)
  for name, outcome in pairs(batch.judged) do
    flat[#flat + 1] = name
    flat[#flat + 1] = outcome
  end
  if #flat > 0 then
    redis.call('HSET', fired, unpack(flat))
    redis.call('EXPIRE', fired, expire_s)
  end
  if batch.used > 0 then
    store_token(queue, first + batch.used - 1)
    renew_counts(queue)
  end
  count(queue, 'enqueued', batch.created, batch.ids)
  wake(queue, batch.ready + count_members(queue))
  if not done then -- those before it are enqueued, and get the same answer again
    error(problem)
  end
  return reply
end

-- store_schedule: stores the call of a schedule in its queue.
-- ARGV[4] name of the schedule
-- ARGV[5] definition bytes: the lengths of the job's options and of its task, each with a space after it; the options (a msgpack
--   map), the task and the times (JSON)
-- RETURNS created version | updated version | unchanged version | late; version: its number, the higher the later. Also one that
--   is unchanged gets a new number, so that another program that stored it before, or replaced it, does not delete it
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local function store_schedule()
  local queue = KEYS[1]
  local name, definition = ARGV[4], ARGV[5]

  local version, before = stored_schedule(queue, name)
  local number = math.max((next_token(queue)), (whole_number(version, 0, NEVER)) + 1)
  redis.call('HSET', queue .. ':schedules', name, digits(number) .. ' ' .. definition)
  store_token(queue, number)
  return {not version and 'created' or before == definition and 'unchanged' or 'updated', digits(number)}
end

-- unstore_schedule: deletes the call of a schedule from its queue: from now on it does not fire. Deletes its last outcome too, also
-- if nothing is stored: of a declared schedule that was dropped.
-- ARGV[4] name of the schedule
-- ARGV[5] version only under this number; empty: under any
-- ARGV[6] undo 1: the schedule of this name is another one, whose firings and last outcome stay; 0: delete them
-- RETURNS ok version | gone | stale | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- FLAGS allow-oom
local function unstore_schedule()
  local queue = KEYS[1]
  local name, version, undo = ARGV[4], ARGV[5], ARGV[6] == '1'

  local found = stored_schedule(queue, name)
  if found and version ~= '' and version ~= found then
    return {'stale'}
  end
  if not undo then
    forget_firings(queue, name)
  end
  if not found then
    return {'gone'}
  end
  redis.call('HDEL', queue .. ':schedules', name)
  return {'ok', found}
end

-- read_schedules: returns the calls of schedules of a queue.
-- ARGV[1..] names text
-- RETURNS ok call... (its number, a space and its definition; empty: it is not stored)
-- RESEND safe: it only reads
-- FLAGS no-writes
local function read_schedules()
  local queue = KEYS[1]

  local reply = {'ok'}
  for i = 1, #ARGV do
    local name = ARGV[i]
    reply[#reply + 1] = redis.call('HGET', queue .. ':schedules', name) or ''
  end
  return reply
end

-- read_outcomes: returns how the last runs of schedules of a queue ended, and which of its jobs no worker takes.
-- ARGV[1..] names text
-- RETURNS ok outcome unserved...: in turn; outcome is a text of note_outcome (empty: none is known), unserved the time in ms since
--   which its job has waited, for over a day, in a queue without workers (empty: it does not)
-- RESEND safe: it only reads
-- FLAGS no-writes
local function read_outcomes()
  local queue = KEYS[1]

  local reply, now = {'ok'}, now_ms()
  for i = 1, #ARGV do
    local name = ARGV[i]
    reply[#reply + 1] = own(redis.pcall('HGET', queue .. ':outcomes', name)) or ''
    reply[#reply + 1] = unserved_since(queue, name, now)
  end
  return reply
end

local DECLARED = 1200000 -- ms: workers renew their declarations every ten minutes

-- index_schedule: stores the times of a schedule whose call is in its queue. Firings count from now on if its times are new, or if
-- it had ended; else it continues where it was. A pause stays.
-- ARGV[4] name of the schedule
-- ARGV[5] home of the call: the name of its queue, or of a shard
-- ARGV[6] version number of the call
-- ARGV[7] definition bytes
-- ARGV[8] times text: what makes firings count from now on if it changes
-- ARGV[9] force replace (one in another queue, too), adopt (one that no worker declares any more, too), or empty
-- RETURNS ok home version (of the one in another queue that was replaced, or empty) | conflict home (it is in another queue) |
--   declared (a worker declares it) | late
-- RESEND safe: the reply is stored under the producer's number; of two numbers of a queue the higher one stays
-- NUMBERED
local function index_schedule()
  local mesh = KEYS[1]
  local name, home, version, definition, times, force = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]
  local schedules, schedules_due = mesh .. ':schedules', mesh .. ':schedules_due'

  redis.call('ZCARD', schedules_due)
  redis.call('ZCARD', mesh .. ':schedules_stored')
  local kept = redis.call('HMGET', schedules, 'def ' .. name, 'ver ' .. name, 'when ' .. name, 'paused ' .. name, 'led')
  local before, where = string.match(kept[2] or '', '^(%d+) (.*)$')
  local seen = tonumber(redis.call('ZSCORE', mesh .. ':schedules_seen', name) or nil)
  if kept[1] and not before and (force ~= 'adopt' or seen and whole_number(kept[5], 0) - seen < DECLARED) then
    return {'declared'}
  elseif before and where ~= home and force ~= 'replace' then
    return {'conflict', where}
  elseif before and where == home and tonumber(before) > tonumber(version) then
    return {'ok', '', ''}
  end
  local now = now_ms()
  redis.call('HSET', schedules, 'def ' .. name, definition, 'ver ' .. name, version .. ' ' .. home, 'when ' .. name, times)
  redis.call('HDEL', schedules, 'own ' .. name)
  redis.call('ZREM', mesh .. ':schedules_seen', name)
  redis.call('ZADD', mesh .. ':schedules_stored', 0, name)
  local was_ended = kept[1] ~= definition and redis.call('HDEL', schedules, 'ended ' .. name) == 1
  if kept[3] ~= times or was_ended then
    redis.call('HSET', schedules, 'last ' .. name, digits(now))
    redis.call('HDEL', schedules, 'next ' .. name, 'owed ' .. name)
  end
  if not kept[4] and (kept[1] ~= definition or not redis.call('ZSCORE', schedules_due, name)) then
    schedule_check(schedules_due, {digits(now), name})
  end
  store_clock(schedules, now)
  keep_schedules(mesh, 0)
  local replaced = where and where ~= home
  return {'ok', replaced and where or '', replaced and before or ''}
end

-- unindex_schedule: deletes the times of a stored schedule.
-- ARGV[1] name of the schedule
-- ARGV[2] version number of the call
-- ARGV[3] home of the call
-- ARGV[4] expire_s s until the declared ones are forgotten, if this was the last stored one
-- RETURNS ok | stale (it was stored again) | gone
-- RESEND safe: it deletes what has this number, and nothing else
-- FLAGS allow-oom
local function unindex_schedule()
  local mesh = KEYS[1]
  local name, version, home, expire_s = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

  redis.call('ZCARD', mesh .. ':schedules_stored')
  local found = redis.call('HGET', mesh .. ':schedules', 'ver ' .. name)
  if not found then
    return {'gone'}
  elseif found ~= version .. ' ' .. home then
    return {'stale'}
  end
  forget_schedule(mesh, name)
  redis.call('ZREM', mesh .. ':schedules_stored', name)
  keep_schedules(mesh, expire_s)
  return {'ok'}
end

-- lease_prefix: takes or renews the lease of a prefix, whose holder alone applies the stored schedules that begin with it. Gives the
-- lease back if it asks for 0 ms. What another program has written there counts as nothing.
-- ARGV[1] prefix text
-- ARGV[2] holder text of ASCII letters and digits, which the program has drawn
-- ARGV[3] lease_ms ms, at most 60000
-- ARGV[4] expire_s s until the declared ones are forgotten, if none is stored
-- RETURNS ok | held
-- RESEND safe: it sets what it set; one that is late holds the prefix until its lease ends
-- FLAGS allow-oom
local function lease_prefix()
  local mesh = KEYS[1]
  local prefix, holder, lease_ms, expire_s = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
  local schedules, field, now = mesh .. ':schedules', 'apply ' .. prefix, now_ms()

  redis.call('ZCARD', mesh .. ':schedules_stored')
  local found, till = string.match(redis.call('HGET', schedules, field) or '', '^(%w+) (%d+)$')
  till = whole_number(till, 0, LATEST)
  if found and found ~= holder and till > now and till <= now + 60000 then -- beyond that, the clock was set back
    return {'held'}
  elseif lease_ms == 0 then
    redis.call('HDEL', schedules, field)
  else
    redis.call('HSET', schedules, field, holder .. ' ' .. digits(now + lease_ms))
    keep_schedules(mesh, expire_s)
  end
  return {'ok'}
end

-- survey_schedules: the facts about some schedules, and how many there are of all. Without names, those about schedules that workers
-- declare.
-- ARGV[1] limit, how many declared ones at most
-- ARGV[2] late ms after its time, from which on a schedule is overdue
-- ARGV[3..] names text
-- RETURNS ok now_ms declared stored overdue row...: how many are declared, stored and overdue; a row is as in page_schedules, for
--   each name that is known
-- RESEND safe: it only reads
-- FLAGS no-writes
local function survey_schedules()
  local mesh = KEYS[1]
  local limit, late = tonumber(ARGV[1]), tonumber(ARGV[2])
  local schedules_due, schedules_seen = mesh .. ':schedules_due', mesh .. ':schedules_seen'

  local now, names = now_ms(), {}
  for i = 3, #ARGV do
    local name = ARGV[i]
    names[#names + 1] = name
  end
  if #names == 0 then
    names = redis.call('ZRANGE', schedules_seen, 0, limit - 1)
  end
  local reply = {'ok', digits(now), redis.call('ZCARD', schedules_seen), redis.call('ZCARD', mesh .. ':schedules_stored'),
    redis.call('ZCOUNT', schedules_due, '-inf', digits(now - late))}
  for _, name in ipairs(names) do
    local row = schedule_row(mesh, name)
    reply[#reply + 1] = row[1] and row or nil
  end
  return reply
end

-- page_schedules: one page of the stored schedules whose names begin with a text, by name.
-- ARGV[1] prefix text
-- ARGV[2] after, the last name of the page before; empty: from the first
-- ARGV[3] limit, how many at most
-- RETURNS ok now_ms row...; a row is definition, last, next, fired, owed, over, ver, ran, ended, paused (each may be missing) and
--   name
-- RESEND safe: it only reads
-- FLAGS no-writes
local function page_schedules()
  local mesh = KEYS[1]
  local prefix, after, limit = ARGV[1], ARGV[2], ARGV[3]

  local reply = {'ok', digits(now_ms())}
  local first = after ~= '' and '(' .. after or '[' .. prefix
  local last = prefix == '' and '+' or '[' .. prefix .. '\255'
  for _, name in ipairs(redis.call('ZRANGEBYLEX', mesh .. ':schedules_stored', first, last, 'LIMIT', 0, limit)) do
    reply[#reply + 1] = schedule_row(mesh, name)
  end
  return reply
end
