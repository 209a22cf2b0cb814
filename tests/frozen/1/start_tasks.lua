#!lua flags=allow-oom
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

-- A task item is a payload, or this marker and the id of a job whose record holds the payload.
local MARKER = '\0worqr\0'

-- The id of the job that `item` refers to; nil for a payload.
local function job_id(item)
  if string.sub(item, 1, 7) == MARKER then
    return string.sub(item, 8)
  end
  return nil
end

-- USES fence reference
-- What a start answers for the claimed `item`: the payload, or for a job its record as names and values, with its id; false
-- for none.
local function entry_of(base, item)
  local id = item and job_id(item)
  if not id then
    return item
  end
  local entry = redis.call('HGETALL', base .. ':active:' .. id)
  if #entry == 0 then
    return false
  end
  entry[#entry + 1], entry[#entry + 2] = 'id', id
  return entry
end

-- Adds to `reply` the entries of `count` claims from `first` on: what a start has claimed before.
local function claimed_again(base, reply, first, count)
  for i = 0, count - 1 do
    local item = redis.call('LINDEX', base .. ':claim:' .. digits(first + i), 0)
    reply[#reply + 1] = entry_of(base, item)
  end
  return reply
end

-- What a start is answered that gets nothing new: its worker, of which the fence holds `place`, stands outside, or has sent
-- it before. For any other one nil, and the claim under which the worker took its last suspect.
local function started_before(base, place, number)
  if not place then
    return {'not_serving'}
  end
  local last, first, count, suspect = string.match(place, '^(%d+) (%d+) (%d+) (%d+)$')
  if number < tonumber(last) then
    return {'late'}
  end
  if number == tonumber(last) then
    return claimed_again(base, {'ok', first}, first, count)
  end
  return nil, suspect
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

-- USES entry line record result set_aside types
-- True if the job was to begin before now and never did.
local function is_expired(fields, now)
  local until_ms = tonumber(fields.expires_at)
  if fields.expires then
    until_ms = (tonumber(fields.run_at) or 0) + tonumber(fields.expires)
  end
  return until_ms and now > until_ms and not fields.started
end

-- False if setting a task aside would meet a key of a foreign type: an error in the midst of it would lose the task.
local function can_set_aside(base, worker)
  return pcall(function()
    check_types(base)
    check_aside_types(base, worker)
  end)
end

-- Moves the last item of the list `source` under `claim` of `worker`; the claim's place in the worker's set of claims is the
-- caller's to add. Answers taken, its entry and the size of its payload; skipped, for a reference whose record is gone or
-- does not wait, which it takes away; expired, when it was set aside under `claim` instead; or empty.
local function claim_last(base, source, worker, claim, now)
  local held = base .. ':claim:' .. claim
  local item = redis.call('RPOPLPUSH', source, held)
  if not item then
    return 'empty'
  end
  local id = job_id(item)
  if not id then
    return 'taken', item, #item
  end
  local job, active = base .. ':job:' .. id, base .. ':active:' .. id
  if redis.pcall('HGET', job, 'state') ~= 'waiting' then
    redis.call('DEL', held)
    return 'skipped'
  end
  redis.call('RENAME', job, active)
  redis.call('HSET', active, 'claim', claim, 'worker', worker, 'state', 'active')
  local entry = entry_of(base, item)
  local fields = {}
  for i = 1, #entry, 2 do
    fields[entry[i]] = entry[i + 1]
  end
  if is_expired(fields, now) and can_set_aside(base, worker) then
    local how = policy_of(base, worker)
    how.kind, how.reason, how.now, how.error_traceback = 'failed', 'expired', now, ''
    how.error_type, how.error_message = 'Expired', 'it was not started before it expired'
    set_aside(base, claim, record_of(item, id, claim, fields), how)
    return 'expired'
  end
  tell(base, id, 'active')
  return 'taken', entry, #fields.task
end

-- USES line
-- Puts up to `limit` jobs whose time has come in line. Answers how many of them can be taken now.
local function promote(base, limit, now)
  local ids = redis.call('ZRANGEBYSCORE', base .. ':due', '-inf', now, 'LIMIT', 0, limit)
  local pushed = 0
  for _, id in ipairs(ids) do
    redis.call('ZREM', base .. ':due', id)
    local kept = redis.pcall('HMGET', base .. ':job:' .. id, 'state', 'suspect')
    if kept[1] == 'due' then
      pushed = pushed + put_in_line(base, id, 0, now, false, kept[2])
    end
  end
  return pushed
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

-- start_tasks: moves up to n tasks into claims of a worker that stands in the fence; a suspect first, one at a time.
-- Jobs that are due are put in line when it runs short; one that has expired is set aside, and its number is used up.
-- Short of n because nothing is left: the worker joins the hungry in the same script. Left some behind: wakes one more.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] claims SET
-- KEYS[4] hungry SET
-- KEYS[5] suspects LIST
-- KEYS[6] paused STRING
-- KEYS[7] due ZSET
-- ARGV[1] worker id
-- ARGV[2] number of the worker's start request on this queue, counts from 1
-- ARGV[3] wanted tasks, 0: only pass a wake-up on
-- ARGV[4] max_bytes bytes of payload after which no further task is taken
-- ARGV[5] max_skipped references to nothing that are skipped at most
-- RETURNS ok first entry... | short first entry... (joined the hungry) | paused | late | not_serving;
--   claims are first, first + 1, ...; an entry is the payload, or for a job the names and values of its record and its id;
--   false for a claim that is gone
-- RESEND safe: fenced by the number; an equal one gets the same claims again, a lower one nothing
-- USES claim_last counts entry fence promote serving wake
local queue, workers, claims, hungry = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local suspects, paused, due = KEYS[5], KEYS[6], KEYS[7]
local worker, number, wanted = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_bytes, max_skipped = tonumber(ARGV[4]), tonumber(ARGV[5])

local before, suspect = started_before(queue, place_in_fence(workers, worker), number)
if before then
  return before
end
if redis.call('EXISTS', paused) == 1 then
  redis.call('HSET', workers, worker, digits(number) .. ' 0 0 ' .. suspect)
  return {'paused'}
end

-- Wrong types show themselves before the first write; of what only an expired job needs, when there is one.
local left, anybody_hungry = redis.call('LLEN', queue) + redis.call('LLEN', suspects), redis.call('SCARD', hungry) > 0
local first_source = redis.call('SISMEMBER', claims, suspect) == 0 and suspects or queue
local source, dry, asleep, woken = first_source, false, redis.call('ZCARD', due), 0
local taken, skipped, bytes, next_claim, now = 0, 0, 0, next_fence(queue), now_ms()
local reply, mine = {'ok', digits(next_claim)}, {}
while taken < wanted and skipped < max_skipped and bytes < max_bytes and not dry do
  local claim = digits(next_claim + taken)
  local word, entry, size = claim_last(queue, source, worker, claim, now)
  if word == 'empty' and source == queue and asleep > 0 then
    woken = promote(queue, max_skipped, now)
    left, asleep, source = left + woken, 0, first_source
  elseif word == 'empty' then
    dry, source = source == queue, queue
  elseif word == 'expired' then
    taken, reply[#reply + 1] = taken + 1, false
  elseif word == 'skipped' then
    skipped = skipped + 1
  else
    if source == suspects then
      suspect, first_source = claim, queue
    end
    source = queue
    taken, bytes, reply[#reply + 1], mine[#mine + 1] = taken + 1, bytes + size, entry, claim
  end
end
for from = 1, #mine, 1000 do
  redis.call('SADD', claims, unpack(mine, from, math.min(from + 999, #mine)))
end

redis.call('HSET', workers, worker, table.concat({digits(number), digits(next_claim), digits(taken), suspect}, ' '))
if taken > 0 then
  note_fence(queue, next_claim + taken - 1)
end
tally(queue, 'claimed', taken)
left = left - taken - skipped
untally_stale(queue, skipped, left)
local wakes = math.min(left, dry and woken or 1) -- dry: for suspects that came due, of which this one may take no more
if anybody_hungry and (wakes > 0 or not dry) then
  redis.call('SREM', hungry, worker)
  wake(queue, wakes)
end
if dry then
  redis.call('SADD', hungry, worker)
  reply[1] = 'short'
end
return reply
