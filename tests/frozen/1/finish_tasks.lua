#!lua flags=allow-oom
-- A task item is a payload, or this marker and the id of a job whose record holds the payload.
local MARKER = '\0worqr\0'

-- The id of the job that `item` refers to; nil for a payload.
local function job_id(item)
  if string.sub(item, 1, 7) == MARKER then
    return string.sub(item, 8)
  end
  return nil
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

-- finish_tasks: ends claims as finished, keeps the results of jobs, puts blocked twins in line; a claim whose cancel mark
-- stands ends as cancelled instead, without a result.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] claims SET
-- KEYS[4] policy HASH
-- ARGV[1] worker id
-- ARGV[2] results among what follows
-- ARGV[3..] ended first, for each result, claim id, kind (bytes, json, none) and value; then the ids of all ended claims
-- RETURNS ok [claim word]...: only those that did not end as finished: cancelled, mine (settled before by this worker,
--   a resend), lost (the worker was swept: the task runs elsewhere)
-- RESEND safe: fenced by the claim
-- USES end_claim serving types wake
local queue, workers, claims, policy = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local worker, results = ARGV[1], tonumber(ARGV[2])

-- Wrong types show themselves before the first write; of what only twins need, when there are some.
redis.call('HLEN', queue .. ':counts')
local no_twins = redis.call('SCARD', queue .. ':blocked') == 0
if not no_twins then
  check_types(queue)
end
local anything_marked = redis.call('SCARD', queue .. ':cancelling') > 0
local suspects_wait = redis.call('LLEN', queue .. ':suspects') > 0 and redis.call('SCARD', queue .. ':hungry') > 0
local why_not = why_not_held(workers, worker)
local nothing = {'kind', 'none', 'value', ''}
local how = {ttl = tonumber(redis.call('HGET', policy, 'result_ttl')) or 0, now = now_ms(), no_twins = no_twins}

local results_of = {}
for i = 3, 2 + 3 * results, 3 do
  local ended, kind, value = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  results_of[ended] = {'kind', kind, 'value', value}
end

-- One call for many claims where that is possible: most of a script's time is spent in calling commands one by one.
local reply, finished, ready = {'ok'}, 0, 0
for from = 3 + 3 * results, #ARGV, 1000 do
  local named = {}
  for i = from, math.min(from + 999, #ARGV) do
    local ended = ARGV[i]
    named[#named + 1] = ended
  end
  local held = redis.call('SMISMEMBER', claims, unpack(named))
  redis.call('SREM', claims, unpack(named))
  for i, claim in ipairs(named) do
    local word = held[i] == 1 and 'finished' or why_not
    if held[i] == 1 then
      word = anything_marked and take_mark(queue, claim) and 'cancelled' or word
      how.outcome, how.facts = word, results_of[claim] or nothing
      local put = end_claim(queue, claim, how)
      if not put and word == 'finished' then
        word = why_not
      end
      ready = ready + (put or 0)
    end
    if word == 'finished' then
      finished = finished + 1
    else
      reply[#reply + 1] = claim
      reply[#reply + 1] = word
    end
  end
end
tally(queue, 'finished', finished)
wake(queue, math.max(ready, suspects_wait and 1 or 0))
return reply
