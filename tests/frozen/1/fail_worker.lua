#!lua flags=allow-oom
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

-- USES reference counts line result
-- Forgets the active job `id`: its record, and its place among the twins of its payload; a blocked twin goes in line. `how`:
-- outcome (finished, cancelled, or gone: nothing is kept), ttl, facts, now, no_twins (nothing is blocked on this queue).
-- Answers how many can be taken now.
local function end_job(base, id, how)
  local active = base .. ':active:' .. id
  local kept = redis.call('HMGET', active, 'twin', 'first', 'last', 'result_ttl', 'cancel_reason')
  if kept[1] then
    redis.call('SREM', base .. ':twins:' .. kept[1], id)
  end
  redis.call('DEL', active)
  if how.outcome == 'cancelled' then
    keep_result(base, id, kept[2], kept[3], kept[4], how.ttl, 'cancelled', {'reason', kept[5] or ''})
  elseif how.outcome == 'finished' then
    keep_result(base, id, kept[2], kept[3], kept[4], how.ttl, 'finished', how.facts)
  else
    tell(base, id, 'gone')
  end
  return how.no_twins and 0 or unblock(base, id, how.now)
end

-- Deletes what lies under `claim`; false if nothing does, else how many twins can be taken now. Its place in the worker's set
-- of claims is the caller's to remove.
local function end_claim(base, claim, how)
  local item = redis.call('LPOP', base .. ':claim:' .. claim)
  if not item then
    return false
  end
  local id = job_id(item)
  return id and end_job(base, id, how) or 0
end

-- True if the cancellation of `claim` was asked for: takes the mark away and tells whoever waits for it.
local function take_mark(base, claim)
  if redis.call('SREM', base .. ':cancelling', claim) == 0 then
    return false
  end
  tally(base, 'cancelled', 1)
  redis.pcall('PUBLISH', base .. '_cancelled', claim)
  return true
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

-- USES record
-- Sets the field `name` of the hash `key`, or takes it away where `value` is false.
local function set_field(key, name, value)
  if value then
    redis.call('HSET', key, name, value)
  else
    redis.call('HDEL', key, name)
  end
end

-- Forgets the record set aside under `claim`, and that its id was. Those of one id know the one before and the one after,
-- and the index knows the newest, so that each can go without a search.
local function forget_aside(base, claim)
  local aside = base .. ':aside:'
  local kept = redis.call('HMGET', aside .. claim, 'id', 'older', 'newer')
  local id, older, newer = kept[1], kept[2], kept[3]
  if older then
    set_field(aside .. older, 'newer', newer)
  end
  if newer then
    set_field(aside .. newer, 'older', older)
  elseif id then
    set_field(base .. ':aside', id, older)
  end
  redis.call('DEL', aside .. claim)
end

-- Writes the record set aside under `claim` and lists it, if it is to be kept; the oldest above the cap go.
local function list_aside(base, claim, record, facts, how)
  local aside, list, keep = base .. ':aside:' .. claim, base .. ':' .. how.kind, tonumber(how.keep)
  if how.kind == 'broken' or keep > 0 then
    if record.job then
      redis.call('RENAME', base .. ':active:' .. record.id, aside)
      redis.call('HDEL', aside, 'claim', 'state', 'queued', 'suspect', 'progress', 'message', 'cancel_reason')
    end
    facts.task, facts.older = record.task, redis.call('HGET', base .. ':aside', record.id) or nil
    if facts.older then
      redis.call('HSET', base .. ':aside:' .. facts.older, 'newer', claim)
    end
    write_hash(aside, facts)
    redis.call('HSET', base .. ':aside', record.id, claim)
    redis.call('ZADD', list, facts.at, claim)
  end
  if how.kind == 'failed' then
    local over = math.min(redis.call('ZCARD', list) - keep, 100)
    if over > 0 then
      local popped = redis.call('ZPOPMIN', list, over)
      for i = 1, #popped, 2 do
        forget_aside(base, popped[i])
      end
    end
  end
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

-- USES aside counts fence line result wake
-- Gives the failure handler of the queue its job: the payload as it is, and beside it what became of it.
local function post_failure(base, claim, task, facts)
  local failures = base .. '-fail'
  local id, fence = '@f' .. claim, next_fence(failures)
  note_fence(failures, fence)
  local number = digits(fence)
  redis.call('HSET', failures .. ':job:' .. id, 'task', task, 'failed', cmsgpack.pack(facts), 'run_at', facts.at,
    'queued', number, 'first', number, 'last', number)
  put_in_line(failures, id, 0, 0)
  tally(failures, 'enqueued', 1)
  wake(failures, 1)
end

-- Ends `claim` by setting its task aside; the failure handler's job is made in the same step. `how`: kind (failed, broken),
-- reason, keep (cap of failed, as text; '0': none), on_failure, ttl, worker, now, error_type, error_message, error_traceback.
-- Answers how many twins can be taken now.
local function set_aside(base, claim, record, how)
  local facts = {id = record.id, reason = how.reason, error_type = how.error_type, error_message = how.error_message,
    error_traceback = how.error_traceback, failures = record.failures, stalls = record.stalls,
    timeouts = record.timeouts, worker = how.worker, at = string.format('%.0f', how.now), meta = record.fields.meta}
  if how.on_failure then
    post_failure(base, claim, record.task, facts)
  end
  list_aside(base, claim, record, facts, how)
  if record.fields.twin then
    redis.call('SREM', base .. ':twins:' .. record.fields.twin, record.id)
  end
  redis.call('DEL', base .. ':active:' .. record.id, base .. ':claim:' .. claim)
  tally(base, how.kind, 1)
  if not record.job then
    return 0
  end
  keep_result(base, record.id, record.fields.first, record.fields.last, record.fields.result_ttl, how.ttl, 'failed',
    {'error_type', how.error_type, 'error_message', how.error_message, 'error_traceback', how.error_traceback})
  return unblock(base, record.id, how.now)
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

-- USES line policy record rules fence
-- What a blocked `twin` changes in the job that it is merged with, whose record has `fields` and which would be due at
-- `run_at`: field by field, as the dispatches of the twin said. Answers when it is due then.
local function merge_twin(job, fields, twin, changes, run_at)
  if twin.update_data then
    changes.task, changes.meta, changes.scheduled_for = twin.task, twin.meta, twin.scheduled_for
    redis.call('HDEL', job, 'meta', 'scheduled_for')
  end
  if twin.update_counts then
    changes.failures, changes.stalls, changes.timeouts, changes.suspect = nil, nil, nil, nil
    redis.call('HDEL', job, 'failures', 'stalls', 'timeouts', 'suspect')
  end
  for _, name in ipairs(POLICY) do
    if twin[name] and (not fields[name] or names_one(twin.update_policy or '', name)) then
      changes[name] = twin[name]
    end
  end
  changes.last = twin.last
  return math.max(tonumber(twin.update_low), math.min(run_at, tonumber(twin.update_high)))
end

-- Makes the task under `claim` wait again, in line or until `how.run_at` (nil: at once), with the counter that this return
-- costs. A raw task about which something must be remembered becomes a job. `queued` is the fence number of its place: one
-- that is not above the number of the last clearing lies in the trash. Answers how many can be taken now.
local function wait_again(base, claim, record, how, now)
  redis.call('DEL', base .. ':claim:' .. claim)
  local front, run_at, remembers = not how.back, how.run_at or now, how.counter ~= ''
  if not record.job and not remembers and run_at <= now then
    redis.call(front and 'RPUSH' or 'LPUSH', base, record.item)
    return 1
  end
  local job, changes = base .. ':job:' .. record.id, {queued = claim, started = '1'}
  if remembers then
    changes[how.counter] = record[how.counter]
  end
  if how.run_at then
    changes.run_at = digits(run_at)
  end
  local max_stalls = tonumber(record.fields.max_stalls) or how.max_stalls
  if record.stalls > 0 and record.stalls >= max_stalls - 1 then
    changes.suspect = '1'
  end
  if record.job then
    local twin = redis.call('SREM', base .. ':blocked', record.id) == 1 and read_hash(job)
    redis.call('RENAME', base .. ':active:' .. record.id, job)
    redis.call('HDEL', job, 'claim', 'worker', 'progress', 'message', 'cancel_reason', 'suspect')
    if twin then
      run_at = merge_twin(job, record.fields, twin, changes, run_at)
      changes.run_at = digits(run_at)
    end
  else
    changes.task, changes.twin, changes.first, changes.last = record.task, redis.sha1hex(record.task), claim, claim
    redis.call('SADD', base .. ':twins:' .. changes.twin, record.id)
  end
  write_hash(job, changes)
  return put_in_line(base, record.id, run_at, now, front, changes.suspect)
end

-- USES counts end_claim record set_aside wait_again
-- The one way back into the queue, for stop, retry, leave and sweep. `how`: counter ('' = free, failures, stalls, timeouts),
-- limit (the job's own, or a default, of that counter), max_stalls, back (true: to the back), run_at (ms, nil: at once), now,
-- ttl, and what set_aside needs. A claim whose cancel mark stands ends as cancelled, one of a queue cleared since is dropped.
-- Answers given, cancelled, dropped, aside or gone, and how many can be taken now.
-- The claim's place in the worker's set of claims is the caller's to remove.
local function give_back(base, claim, how)
  local record = read_claim(base, claim)
  if take_mark(base, claim) then
    return 'cancelled', end_claim(base, claim, {outcome = 'cancelled', ttl = how.ttl, now = how.now}) or 0
  end
  if not record then
    return 'gone', end_claim(base, claim, {outcome = 'gone', now = how.now}) or 0
  end
  if tonumber(claim) <= (tonumber(redis.call('HGET', base .. ':counts', 'cleared')) or 0) then
    tally(base, 'dropped', 1)
    return 'dropped', end_claim(base, claim, {outcome = 'cancelled', ttl = how.ttl, now = how.now}) or 0
  end
  if how.counter ~= '' then
    record[how.counter] = record[how.counter] + 1
    if record[how.counter] >= (tonumber(record.fields['max_' .. how.counter]) or how.limit) then
      return 'aside', set_aside(base, claim, record, how)
    end
  end
  return 'given', wait_again(base, claim, record, how, how.now)
end

-- The fence is a hash: worker -> number, first claim, count and suspect of its last start request. A worker whose claims are
-- given back in several steps stands there as leaving until the last: it gets nothing, but whoever looks for claims finds them.
local LEAVING = 'leaving'

-- What the fence holds of `worker`; nil if it stands outside, or leaves.
local function place_in_fence(workers, worker)
  local place = redis.call('HGET', workers, worker)
  if place and place ~= LEAVING then
    return place
  end
  return nil
end

-- Why a claim is not among those of `worker`: it settled it before (a resend), or it was swept.
local function why_not_held(workers, worker)
  return place_in_fence(workers, worker) and 'mine' or 'lost'
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

-- USES give_back result wake serving types
-- Up to `limit` of the claims, newest first. Of more than that the order is found once and kept, until all are given back.
local function newest_first(base, worker, limit)
  local claims, order = base .. ':claims:' .. worker, base .. ':leaving:' .. worker
  if redis.call('EXISTS', order) == 0 then
    if redis.call('SCARD', claims) <= limit then
      return redis.call('SORT_RO', claims, 'DESC')
    end
    redis.call('SORT', claims, 'STORE', order)
  end
  return redis.call('RPOP', order, limit)
end

-- Takes `worker` out of the fence and gives up to `limit` of its claims back, newest first, so that the old order stands.
-- With counter 'stalls' this is a sweep, with '' the worker leaves: one code path. Answers ok or more, then how many.
local function take_back(base, worker, limit, counter)
  local claims, policy = base .. ':claims:' .. worker, base .. ':policy:' .. worker
  check_types(base)
  check_aside_types(base, worker)
  local how = policy_of(base, worker)
  how.counter, how.limit, how.kind, how.reason, how.now = counter, how.max_stalls, 'failed', 'stalled', now_ms()
  how.error_type, how.error_traceback = 'Stalled', ''
  how.error_message = 'its workers died while it ran, as often as max_stalls allows'
  local ended, ready = {given = 0, cancelled = 0, dropped = 0, aside = 0, gone = 0}, 0
  for _, claim in ipairs(newest_first(base, worker, limit)) do
    if redis.call('SREM', claims, claim) == 1 then
      local word, put = give_back(base, claim, how)
      ended[word], ready = ended[word] + 1, ready + put
    end
  end
  redis.call('SREM', base .. ':hungry', worker)
  if counter ~= '' then
    tally(base, 'stalled', ended.given + ended.aside)
  end
  local anything_left = redis.call('LLEN', base) + redis.call('LLEN', base .. ':suspects') > 0
  wake(base, math.max(ready, anything_left and 1 or 0)) -- it may take a wake-up along
  if redis.call('EXISTS', claims) == 1 then
    redis.call('HSET', base .. ':workers', worker, LEAVING)
    return {'more', ended.given, ended.cancelled, ended.aside}
  end
  redis.call('HDEL', base .. ':workers', worker)
  redis.call('DEL', policy, base .. ':leaving:' .. worker)
  return {'ok', ended.given, ended.cancelled, ended.aside}
end

-- fail_worker: takes a dead worker out of the fence of a queue and gives its claims back to the front in their old order,
-- each with one stall more; one stall before the limit to the suspects, set aside at it. Call again while it answers more.
-- KEYS[1] queue LIST
-- ARGV[1] worker id
-- ARGV[2] limit claims given back in one call
-- RETURNS ok given cancelled aside | more given cancelled aside
-- RESEND safe: worker ids are never used again, so a copy finds what is left or nothing
-- USES take_back
local queue = KEYS[1]
local worker, limit = ARGV[1], tonumber(ARGV[2])

return take_back(queue, worker, limit, 'stalls')
