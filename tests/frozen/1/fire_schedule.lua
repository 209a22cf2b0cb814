#!lua
-- Adds `n` to the counter `field` of the queue and tells those who listen to its events.
local function tally(base, field, n)
  if n == 0 then
    return
  end
  if redis.call('HINCRBY', base .. ':counts', field, n) == n then
    redis.call('EXPIRE', base .. ':counts', 2592000)
  end
  local events = base .. ':events'
  local heard = redis.pcall('PUBSUB', 'NUMSUB', events)
  if heard[2] and heard[2] > 0 then
    redis.pcall('PUBLISH', events, field .. ' ' .. string.format('%.0f', n))
  end
end

-- Adds `n` to the number of references in the lists whose record is gone (n may be negative); no event. Never below 0: there
-- are references that nobody counted, of a foreign producer or from before the counters expired.
local function tally_stale(base, n)
  if n ~= 0 then
    local stale = (tonumber(redis.call('HGET', base .. ':counts', 'stale')) or 0) + n
    if stale > 0 then
      redis.call('HSET', base .. ':counts', 'stale', stale)
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

-- Marks `claim` as to be cancelled and tells its owner.
local function mark(base, claim)
  if redis.call('SADD', base .. ':cancelling', claim) == 1 then
    redis.pcall('PUBLISH', base .. '_cancel', claim)
  end
end

-- The workers that hold claims, or may, in the order of their ids. Reads their sets of claims: one of a wrong type is an error
-- before the first write.
local function holders_of(base)
  local workers = redis.call('HKEYS', base .. ':workers')
  table.sort(workers)
  for _, worker in ipairs(workers) do
    redis.call('SCARD', base .. ':claims:' .. worker)
  end
  return workers
end

-- Calls look(claim) for at most `budget` claims of `holders`, in the order of worker ids and, within each, of claims. `after`
-- is '-', or where the last call ended: a claim, a space, its worker. Answers the same, '-' when all were looked at.
local function each_claim(base, holders, after, budget, look)
  local last, behind = string.match(after, '^(%d+) (.*)$')
  for _, worker in ipairs(holders) do
    if not behind or worker >= behind then
      for _, claim in ipairs(redis.call('SORT_RO', base .. ':claims:' .. worker)) do
        if worker ~= behind or tonumber(claim) > tonumber(last) then
          if budget <= 0 then
            return after
          end
          look(claim)
          after, budget = claim .. ' ' .. worker, budget - 1
        end
      end
    end
  end
  return '-'
end

-- A task item is a payload, or this marker and the id of a job whose record holds the payload.
local MARKER = '\0worqr\0'

-- The id of the job that `item` refers to; nil for a payload.
local function job_id(item)
  if string.sub(item, 1, 7) == MARKER then
    return string.sub(item, 8)
  end
  return nil
end

-- USES reference
-- A job's record says in `state` where it stands: waiting (a reference lies in a list), due (in the zset of due times),
-- blocked (the same id runs), active. A reference is only a place in line: one whose record is not waiting is skipped.

-- Tells whoever watches the job that it changed: a hint, they look.
local function tell(base, id, word)
  redis.pcall('PUBLISH', base .. ':job:' .. id, word)
end

local function state_at(run_at, now)
  return run_at > now and 'due' or 'waiting'
end

-- Puts the job `id`, whose record says where it will stand and which stands nowhere yet, in line, or among the due until
-- `run_at`. To the back, or to the `front`; a suspect goes to the suspects. Answers 1 if somebody can take it now, else 0.
local function stand(base, id, run_at, now, front, suspect)
  if run_at > now then
    local due = base .. ':due'
    redis.call('ZADD', due, string.format('%.0f', run_at), id)
    if redis.call('ZRANGE', due, 0, 0)[1] == id then
      local prefix = string.match(base, '^(.-):{')
      redis.pcall('PUBLISH', '{' .. prefix .. '}:due', string.format('%.0f ', run_at - now) .. base)
    end
    tell(base, id, 'due')
    return 0
  end
  local list = suspect and base .. ':suspects' or base
  redis.call(front and 'RPUSH' or 'LPUSH', list, MARKER .. id)
  tell(base, id, 'waiting')
  return 1
end

-- As `stand`, for a job whose record does not say it yet.
local function put_in_line(base, id, run_at, now, front, suspect)
  redis.call('HSET', base .. ':job:' .. id, 'state', state_at(run_at, now))
  return stand(base, id, run_at, now, front, suspect)
end

-- The twin that waited for the active job `id` to end: in line it goes. Answers as put_in_line, 0 if there is none.
local function unblock(base, id, now)
  if redis.call('SREM', base .. ':blocked', id) == 0 then
    return 0
  end
  local job = base .. ':job:' .. id
  redis.call('HDEL', job, 'update_data', 'update_counts', 'update_policy', 'update_low', 'update_high')
  return put_in_line(base, id, tonumber(redis.call('HGET', job, 'run_at')) or 0, now)
end

-- USES line
-- What a sweep, or whoever else speaks for a worker, must know of its handler.
local function policy_of(base, worker)
  local kept = redis.call('HMGET', base .. ':policy:' .. worker, 'max_stalls', 'keep_failed', 'on_failure',
    'result_ttl')
  return {worker = worker, max_stalls = tonumber(kept[1]) or 3, keep = kept[2] or '1000', on_failure = kept[3] == '1',
    ttl = tonumber(kept[4]) or 0}
end

-- Milliseconds that results are kept on this queue if the job itself does not say: as any of its workers says.
local function any_result_ttl(base)
  for _, worker in ipairs(redis.call('HKEYS', base .. ':workers')) do
    local ttl = tonumber(redis.call('HGET', base .. ':policy:' .. worker, 'result_ttl'))
    if ttl then
      return ttl
    end
  end
  return 0
end

-- Makes room for the result of a newer dispatch; that of an earlier one stays for whoever is about to read it.
local function retire_result(base, id)
  local result = base .. ':result:' .. id
  if redis.call('EXISTS', result) == 1 then
    redis.call('RENAME', result, base .. ':older_result:' .. id)
  end
end

-- Keeps how the job `id` ended, for as long as its `result_ttl` (false: ttl) says, and tells whoever waits. `first` and
-- `last` are the dispatches that it belongs to; `facts` names and values in turn.
local function keep_result(base, id, first, last, result_ttl, ttl, outcome, facts)
  ttl = tonumber(result_ttl) or ttl
  if ttl > 0 then
    local result = base .. ':result:' .. id
    retire_result(base, id)
    redis.call('HSET', result, 'outcome', outcome, 'first', first or '0', 'last', last or '0', unpack(facts))
    redis.call('PEXPIRE', result, string.format('%.0f', ttl))
  end
  tell(base, id, outcome)
end

-- USES counts mark result
-- Deletes the record of a job that does not run, wherever its place in line is (that is the caller's), and tells whoever
-- waits for it that it was cancelled. `ttl` as keep_result.
local function forget_job(base, id, ttl, reason)
  local job = base .. ':job:' .. id
  local kept = redis.call('HMGET', job, 'twin', 'first', 'last', 'result_ttl')
  if kept[1] then
    redis.call('SREM', base .. ':twins:' .. kept[1], id)
  end
  redis.call('DEL', job, base .. ':taken:' .. id)
  keep_result(base, id, kept[2], kept[3], kept[4], ttl, 'cancelled', {'reason', reason})
end

-- Cancels the job `id` where it waits, is due or is blocked, in O(log n). Answers 1, or 0 if it does none of this.
local function cancel_waiting(base, id, ttl, reason)
  local kept = redis.call('HMGET', base .. ':job:' .. id, 'state', 'queued')
  local cleared = tonumber(redis.call('HGET', base .. ':counts', 'cleared')) or 0
  if not kept[1] or (tonumber(kept[2]) or 0) <= cleared then -- gone, or in the trash
    return 0
  end
  if kept[1] == 'waiting' then
    tally_stale(base, 1)
  end
  redis.call('ZREM', base .. ':due', id)
  redis.call('SREM', base .. ':blocked', id)
  forget_job(base, id, ttl, reason)
  return 1
end

-- Marks the run of the job `id`, if it runs. Answers its claim, or nil. `last`: the dispatches up to this one are cancelled
-- with it, for their handles (nil: only its own).
local function cancel_running(base, id, reason, last)
  local active = base .. ':active:' .. id
  local claim = redis.call('HGET', active, 'claim')
  if not claim then
    return nil
  end
  redis.call('HSET', active, 'cancel_reason', reason)
  if last then
    redis.call('HSET', active, 'last', last)
  end
  redis.call('DEL', base .. ':taken:' .. id)
  mark(base, claim)
  return claim
end

-- Cancels whatever there is of the job `id`, and frees the id, also of a job that has ended. Answers how many did not run (0
-- or 1), and the claim of the one that runs, or nil.
local function cancel_one(base, id, reason)
  local blocked = redis.call('SISMEMBER', base .. ':blocked', id) == 1
  local last = blocked and redis.call('HGET', base .. ':job:' .. id, 'last')
  local waiting = cancel_waiting(base, id, any_result_ttl(base), reason)
  redis.call('DEL', base .. ':taken:' .. id)
  tally(base, 'cancelled', waiting)
  return waiting, cancel_running(base, id, reason, last)
end

-- A fence number as text; a plain tostring would print 1.7e+15.
local function digits(number)
  return string.format('%.0f', number)
end

-- The queue's next fence number: above the last one, and above the clock, so that it never regresses.
local function next_fence(base)
  local last = tonumber(redis.call('HGET', base .. ':counts', 'fence')) or 0
  local time = redis.call('TIME')
  return math.max(last + 1, time[1] * 1000000 + time[2])
end

-- Notes the last fence number that was given out. A tally follows, which sees to it that the counters expire.
local function note_fence(base, number)
  redis.call('HSET', base .. ':counts', 'fence', digits(number))
end

-- Reads the keys of a queue that its scripts write, so that one of a wrong type (a foreign application's) is an error before
-- the first write, not after it.
local function check_types(base)
  redis.call('LLEN', base)
  redis.call('LLEN', base .. ':suspects')
  redis.call('SCARD', base .. ':hungry')
  redis.call('SCARD', base .. ':cancelling')
  redis.call('HLEN', base .. ':workers')
  redis.call('HLEN', base .. ':counts')
  redis.call('ZCARD', base .. ':due')
  redis.call('SCARD', base .. ':blocked')
  redis.call('HLEN', base .. ':aside')
  redis.call('ZCARD', base .. ':failed')
  redis.call('ZCARD', base .. ':broken')
end

-- As check_types: what else is read and written when a task of `worker` is set aside, its failure handler's queue with it.
local function check_aside_types(base, worker)
  local failures = base .. '-fail'
  redis.call('HLEN', base .. ':policy:' .. worker)
  redis.call('LLEN', failures)
  redis.call('HLEN', failures .. ':counts')
  redis.call('SCARD', failures .. ':hungry')
end

-- USES counts
-- What there is of the job `id`: `job`, where it waits, is due or is blocked; `active`, true while it runs; `taken`, true while
-- its id is; `last`, the newest of its dispatches. A record in the trash is none, but `trashed` says why it lies there: that
-- holds for the whole id.
local function look_for(base, id)
  local kept = redis.call('HMGET', base .. ':job:' .. id, 'state', 'queued', 'run_at', 'last', 'update_low',
    'update_high', 'update_policy')
  local active = redis.call('HMGET', base .. ':active:' .. id, 'claim', 'last')
  local cleared = redis.call('HMGET', base .. ':counts', 'cleared', 'cleared_why')
  local trashed = kept[1] and tonumber(kept[2]) <= (tonumber(cleared[1]) or 0) and (cleared[2] or '') or nil
  local taken = redis.call('GET', base .. ':taken:' .. id)
  if trashed then
    taken = false
  end
  local seen = {active = active[1] and true, taken = taken and true, trashed = trashed}
  seen.last = active[2] or taken or '0'
  if kept[1] and not trashed then
    seen.job = {state = kept[1], run_at = tonumber(kept[3]), low = tonumber(kept[5]), high = tonumber(kept[6]),
      policy = kept[7] or ''}
    seen.last = kept[4]
  end
  return seen
end

-- Why the dispatch `o` stores nothing: duplicate, unchanged, full; nil if it does. `more`: jobs that are stored before it.
local function refusal(base, o, seen, more)
  if seen.job or seen.active or seen.taken then
    if o.exists == 'raise' then
      return 'duplicate'
    elseif o.exists == 'skip' or not seen.job and not seen.active then
      return 'unchanged'
    end
  end
  return not seen.job and o.max_length and count_queued(base) + more >= o.max_length and 'full' or nil
end

-- The fields of a record that a dispatch may give, and that otherwise the handler's options decide.
local POLICY = {'max_failures', 'max_stalls', 'max_timeouts', 'min_backoff', 'max_backoff', 'jitter', 'retry_on',
  'fail_on', 'timeout', 'result_ttl'}

-- USES policy
local NEVER = 9007199254740991

-- The rule by which a dispatch moves a due time, as bounds to clamp it by: min and max of two such rules is one again.
local function bounds_of(when, asked)
  local lower = (when == 'keep' or when == 'earlier') and 0 or asked
  local upper = (when == 'keep' or when == 'later') and NEVER or asked
  return lower, upper
end

local function clamp(value, lower, upper)
  return math.max(lower, math.min(value, upper))
end

local function resets_counts(o)
  if o.counts == nil then
    return o.data ~= false
  end
  return o.counts
end

local function names_one(names, name)
  return string.find(' ' .. names .. ' ', ' ' .. name .. ' ', 1, true) ~= nil
end

-- The names of the fields that the dispatch gives and that replace what is there, and with them those in `others`; nil: none.
local function forced_names(o, others)
  local forced = {}
  for _, name in ipairs(POLICY) do
    if names_one(others, name) or o.fields and o.fields[name] and names_one(o.policy or '', name) then
      forced[#forced + 1] = name
    end
  end
  return forced[1] and table.concat(forced, ' ') or nil
end

-- Replaces a field of the policy if the dispatch says so, else only fills one that is not there. True if it changed anything.
local function change_policy(job, o)
  local changed = false
  for name, value in pairs(o.fields or {}) do
    if names_one(o.policy or '', name) then
      changed = redis.call('HGET', job, name) ~= value or changed
      redis.call('HSET', job, name, value)
    else
      changed = redis.call('HSETNX', job, name, value) == 1 or changed
    end
  end
  return changed
end

-- USES reference
-- A hash as a table, nil if it is empty.
local function read_hash(key)
  local flat = redis.call('HGETALL', key)
  if #flat == 0 then
    return nil
  end
  local fields = {}
  for i = 1, #flat, 2 do
    fields[flat[i]] = flat[i + 1]
  end
  return fields
end

-- Writes the table `fields` into the hash `key`.
local function write_hash(key, fields)
  local flat = {}
  for name, value in pairs(fields) do
    flat[#flat + 1] = name
    flat[#flat + 1] = value
  end
  redis.call('HSET', key, unpack(flat))
end

local function record_of(item, id, claim, fields)
  return {item = item, job = id, id = id or '@' .. claim, fields = fields, task = fields.task,
    failures = tonumber(fields.failures) or 0, stalls = tonumber(fields.stalls) or 0,
    timeouts = tonumber(fields.timeouts) or 0}
end

-- What is known of the task under `claim`, read before anything is written; nil if nothing lies there, or a reference to
-- nothing.
local function read_claim(base, claim)
  local item = redis.call('LINDEX', base .. ':claim:' .. claim, 0)
  if not item then
    return nil
  end
  local id = job_id(item)
  local fields = {task = item}
  if id then
    fields = read_hash(base .. ':active:' .. id)
  end
  return fields and fields.task and record_of(item, id, claim, fields) or nil
end

-- USES line rules record counts fence
-- Moves a job that is in line or due to where its new due time says. Answers as put_in_line.
local function move(base, id, kept, run_at, now, front)
  if kept.state == 'waiting' then
    if run_at <= now then
      tell(base, id, 'waiting')
      return 0 -- it keeps its place
    end
    tally_stale(base, 1)
  else
    redis.call('ZREM', base .. ':due', id)
  end
  local suspect = redis.call('HGET', base .. ':job:' .. id, 'suspect')
  return put_in_line(base, id, run_at, now, front, suspect)
end

-- Changes the job that waits, is due or is blocked, field by field as the dispatch says.
local function update(base, id, o, task, number, asked, now, kept)
  local job, blocked, fields, gone = base .. ':job:' .. id, kept.state == 'blocked', {last = number}, {}
  local lower, upper = bounds_of(o.when, asked)
  local run_at = clamp(kept.run_at, lower, upper)
  local changed = run_at ~= kept.run_at or o.data ~= false or resets_counts(o)
  if o.data ~= false then
    fields.task, fields.meta, fields.scheduled_for = task, o.meta, o.scheduled_for
    fields.update_data = blocked and '1' or nil
    gone = {'meta', 'scheduled_for'}
  end
  if run_at ~= kept.run_at or (o.when or 'set') == 'set' then
    fields.run_at, fields.expires, fields.expires_at = digits(run_at), o.expires, o.expires_at
    gone[#gone + 1], gone[#gone + 2] = 'expires', 'expires_at'
  end
  if resets_counts(o) then
    fields.update_counts = blocked and '1' or nil
    for _, counter in ipairs({'failures', 'stalls', 'timeouts', 'suspect'}) do
      gone[#gone + 1] = counter
    end
  end
  if blocked then
    fields.update_low = digits(clamp(kept.low, lower, upper))
    fields.update_high = digits(clamp(kept.high, lower, upper))
    fields.update_policy = forced_names(o, kept.policy)
  end
  if #gone > 0 then
    redis.call('HDEL', job, unpack(gone))
  end
  write_hash(job, fields)
  changed = change_policy(job, o) or changed
  if blocked then
    tell(base, id, 'blocked')
    return 'blocked', 0
  end
  return changed and 'updated' or 'unchanged', run_at ~= kept.run_at and move(base, id, kept, run_at, now, o.front) or 0
end

-- USES look rules update line record result cancel fence
-- A new job. If the same id runs (`seen.active`) it is blocked, and remembers what its dispatch would have changed, should that
-- run come back instead of ending.
local function create(base, id, o, task, number, asked, now, seen)
  local job, lower, upper = base .. ':job:' .. id, bounds_of(o.when, asked)
  local fields = {task = task, run_at = digits(asked), queued = number, first = number, last = number, meta = o.meta,
    scheduled_for = o.scheduled_for, expires = o.expires, expires_at = o.expires_at}
  for name, value in pairs(o.fields or {}) do
    fields[name] = value
  end
  if seen.trashed then
    forget_job(base, id, any_result_ttl(base), seen.trashed)
  end
  if o.id then
    retire_result(base, id)
  end
  if seen.active then
    fields.state, fields.update_low, fields.update_high = 'blocked', digits(lower), digits(upper)
    fields.update_data, fields.update_policy = o.data ~= false and '1' or nil, forced_names(o, '')
    fields.update_counts = resets_counts(o) and '1' or nil
    write_hash(job, fields)
    redis.call('SADD', base .. ':blocked', id)
    tell(base, id, 'blocked')
    return 'blocked', 0
  end
  fields.state = state_at(asked, now)
  write_hash(job, fields)
  return 'created', stand(base, id, asked, now, o.front)
end

-- One dispatch: a new job, or a change of the one that has its id. `o`: id (nil: a new one), delay or run_at (ms), when (set,
-- keep, later, earlier), exists (update, skip, raise), data, counts, policy (names of fields to replace), fields, meta,
-- expires, expires_at, scheduled_for, unique_for, max_length, front; `number` is its fence number, as text. `seen`: what
-- look_for found just now. Answers the outcome, the id, the dispatch that its handle waits for, how many can be taken now, and
-- how many jobs there are more (0 or 1).
local function upsert(base, o, task, number, now, seen)
  local id = o.id or '@' .. number
  seen = seen or o.id and look_for(base, id) or {last = number}
  local outcome = refusal(base, o, seen, 0)
  if outcome then
    return outcome, id, seen.last, 0, 0
  end
  local ready
  local asked = o.run_at or now + (o.delay or 0)
  if seen.job then
    outcome, ready = update(base, id, o, task, number, asked, now, seen.job)
  else
    outcome, ready = create(base, id, o, task, number, asked, now, seen)
  end
  if o.unique_for then
    redis.call('SET', base .. ':taken:' .. id, number, 'PX', digits(o.unique_for))
  end
  return outcome, id, number, ready, seen.job and 0 or 1
end

-- Wakes up to min(n, 16) hungry workers, each on its own channel. A publish that reaches nobody moves on to the next, 64
-- tries at most: a wake-up is a hint, and the scan finds what it misses.
local function wake(base, n)
  local left, tries = math.min(n, 16), 64
  while left > 0 and tries > 0 do
    local worker = redis.call('SPOP', base .. ':hungry')
    if not worker then
      return
    end
    local heard = redis.pcall('PUBLISH', base .. ':wake:' .. worker, '1')
    if type(heard) == 'number' and heard > 0 then
      left = left - 1
    end
    tries = tries - 1
  end
end

-- Wakes one more if a suspect waits: whoever has just ended a claim may have held the one suspect it is allowed.
local function wake_for_suspects(base)
  if redis.call('LLEN', base .. ':suspects') > 0 then
    wake(base, 1)
  end
end

-- fire_schedule: enqueues one firing of a schedule as the job cron:NAME, once, whoever asks how often. Firings come in the
-- order of their nominal times: one that is older than the last is over.
-- KEYS[1] queue LIST
-- KEYS[2] fired HASH
-- ARGV[1] name of the schedule
-- ARGV[2] nominal ms
-- ARGV[3] run_at ms
-- ARGV[4] overlap when the job of an earlier firing is still there: skip, queue, or cancel (one that does not run is replaced)
-- ARGV[5] expire_s s that the last firings of the queue's schedules are remembered
-- ARGV[6] task bytes
-- RETURNS ok | skipped (an earlier firing waits or runs) | busy (the same; nothing was done, try again) | fired (a later firing
--   was judged before)
-- RESEND safe: fenced by the nominal time; an equal one gets the same answer again, and nothing happens
-- USES cancel counts fence types upsert wake
local queue, fired = KEYS[1], KEYS[2]
local name, nominal, run_at = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local overlap, expire_s, task = ARGV[4], ARGV[5], ARGV[6]

local last, word = string.match(redis.call('HGET', fired, name) or '', '^(%d+) (%a+)$')
if last and nominal <= tonumber(last) then
  return {nominal == tonumber(last) and word or 'fired'}
end
check_types(queue)
local id = 'cron:' .. name
local seen = look_for(queue, id)
local earlier = seen.job or seen.active
if earlier and overlap == 'queue' then
  return {'busy'}
end
word = 'ok'
if earlier and overlap == 'skip' then
  word = 'skipped'
else
  if seen.active then
    cancel_running(queue, id, 'the next firing of its schedule came')
  end
  local number = next_fence(queue)
  note_fence(queue, number)
  local o = {id = id, run_at = run_at, scheduled_for = digits(nominal)}
  local _, _, _, ready, more = upsert(queue, o, task, digits(number), now_ms(), seen)
  redis.call('EXPIRE', queue .. ':counts', 2592000)
  tally(queue, 'enqueued', more)
  wake(queue, ready)
end
redis.call('HSET', fired, name, digits(nominal) .. ' ' .. word)
redis.call('EXPIRE', fired, expire_s)
return {word}
