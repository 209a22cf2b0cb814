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

-- Requests carry (producer, number), so that a copy that comes again, or late, changes nothing. Replies are kept as they are,
-- one field per number, until the producer says that it needs them no more: 'low' is the lowest number it may still send, and
-- no reply is kept below 'oldest', which follows in steps.
local REPLIES_EXPIRE = 3600
local low, oldest

-- The reply to a request seen before, {'late'} for one the producer gave up or has the answer of, nil for a new one.
local function replied(producer, number)
  local kept = redis.call('HMGET', producer, number, 'low', 'oldest')
  low, oldest = tonumber(kept[2]) or 0, tonumber(kept[3])
  if tonumber(number) < low then
    return {'late'}
  end
  if kept[1] then
    redis.call('EXPIRE', producer, REPLIES_EXPIRE)
    return cmsgpack.unpack(kept[1])
  end
  return nil
end

-- Keeps `reply` under `number`, which replied() did not know, and forgets those below `lowest`, at most 1000 at a time.
local function remember(producer, number, lowest, reply)
  low = math.max(tonumber(lowest), low)
  oldest = oldest or low
  local above = math.min(low, oldest + 1000)
  local gone = {}
  for n = oldest, above - 1 do
    gone[#gone + 1] = string.format('%.0f', n)
  end
  if #gone > 0 then
    redis.call('HDEL', producer, unpack(gone))
  end
  redis.call('HSET', producer, number, cmsgpack.pack(reply),
    'low', string.format('%.0f', low), 'oldest', string.format('%.0f', math.max(oldest, above)))
  redis.call('EXPIRE', producer, REPLIES_EXPIRE)
  return reply
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

-- cancel_task: cancels every task of a queue with this payload: waiting ones are removed, running ones are marked and their
-- workers told. One script sees all of the queue as long as no more than budget claims are held on it.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] counts HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] task bytes
-- ARGV[4] cursor among the twins, 0 at first, - when they are done
-- ARGV[5] after place among the claims up to which they were looked at, - at first
-- ARGV[6] budget claims, and twins, to look at in one call
-- ARGV[7] reason text for whoever waits for a result
-- RETURNS ok waiting running cursor after claim... | more (the same; call again with cursor and after) | late
-- RESEND safe: the reply is stored under the producer's number
-- USES cancel reference mark producer counts types
local producer, queue, counts = KEYS[1], KEYS[2], KEYS[3]
local number, lowest, task = ARGV[1], ARGV[2], ARGV[3]
local cursor, after, budget, reason = ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]

local before = replied(producer, number)
if before then
  return before
end
check_types(queue)
redis.call('HLEN', counts)
local holders, ttl = holders_of(queue), any_result_ttl(queue)

local reply = {'ok', 0, 0, cursor, after}
local raw, jobs = not job_id(task) and redis.call('LREM', queue, 0, task) or 0, 0
local twins = queue .. ':twins:' .. redis.sha1hex(task)
if cursor ~= '-' then
  local page = redis.call('SSCAN', twins, cursor, 'COUNT', budget)
  cursor = page[1] == '0' and '-' or page[1]
  for _, id in ipairs(page[2]) do
    local claim = cancel_running(queue, id, reason)
    if claim then
      reply[#reply + 1] = claim
    elseif redis.call('EXISTS', queue .. ':job:' .. id) == 0 then
      redis.call('SREM', twins, id)
    else
      jobs = jobs + cancel_waiting(queue, id, ttl, reason)
    end
  end
end
if cursor == '-' and not job_id(task) then
  after = each_claim(queue, holders, after, budget, function(claim)
    if redis.call('LPOS', queue .. ':claim:' .. claim, task) then
      mark(queue, claim)
      reply[#reply + 1] = claim
    end
  end)
end
tally(queue, 'cancelled', raw + jobs)
local word = cursor == '-' and after == '-' and 'ok' or 'more'
reply[1], reply[2], reply[3], reply[4], reply[5] = word, raw + jobs, #reply - 5, cursor, after
return remember(producer, number, lowest, reply)
