-- The admission of a worker to a queue: the hash of admitted workers, their handler options, and the rights they need.
-- The hash has for each worker the number, first claim, number of claims and suspect of its last start request. If a
-- worker's claims are released in several steps, its value is `leaving` until the last step. Such a worker claims nothing,
-- but its claims can be listed.

local LEAVING = 'leaving'

-- Returns the admission of `worker`; nil if the worker does not serve the queue, or leaves it.
local function admission_of(workers, worker)
  local admission = redis.call('HGET', workers, worker)
  if admission and admission ~= LEAVING then
    return admission
  end
  return nil
end

-- Returns why a claim is not among those of `worker`: mine (the worker settled it before; a resend) or lost (the claims of
-- the worker were recovered).
local function unheld_status(workers, worker)
  return admission_of(workers, worker) and 'mine' or 'lost'
end

-- Returns the handler options that a script needs when it acts for a worker, for example in its recovery. They are: worker,
-- max_stalls, keep_failed (dead-letter records), on_failure (true: there is a failure handler) and result_ttl (ms). A job's
-- own max_stalls and result_ttl come first.
local function worker_policy(base, worker)
  local kept = redis.call('HMGET', base .. ':policy:' .. worker, 'max_stalls', 'keep_failed', 'on_failure',
    'result_ttl')
  return {worker = worker, max_stalls = whole_number(kept[1], 3), keep_failed = whole_number(kept[2], 1000),
    on_failure = kept[3] == '1', result_ttl = whole_number(kept[4], 0)}
end

-- The commands that a worker's scripts run on a queue, each with example keys; @ is the queue's base. A script that is
-- refused a command in its middle has already done part of its work, and a task that it held is lost. So a worker whose
-- user lacks a right may not serve the queue. The script asks the server and calls none of them. Each has as many arguments
-- as a call would need.
local RIGHTS = [[
  DEL @:claim:1, DEL @:lanes, DEL @:lanes:idle, DEL @:policy:1, EXISTS @:paused, EXPIRE @:counts 1,
  GET @:sent:1, GET @:taken:1, GETRANGE @:history 0 1, HDEL @:lanes:claims 1, HDEL @:outbox 1, HDEL @:workers 1,
  HEXISTS @:job:1 1, HEXISTS @:lanes:claims 1, HGET @:aside 1, HGETALL @:active:1, HINCRBY @:counts 1 1,
  HINCRBY @:lanes:running 1 1, HINCRBY @:part:1 1 1, HKEYS @:lanes:rules, HKEYS @:workers, HLEN @:policy:1,
  HMGET @:aside:1 1, HMGET @:batch:1 1, HMGET @:lanes:rules 1, HMGET @:limits 1, HRANDFIELD @:waiters 16,
  HSCAN @:outbox 0, HSET @:active:1 1 1, HSET @:aside 1 1, HSET @:aside:1 1 1, HSET @:batch:1 1 1,
  HSET @:batch:1:parts 1 1, HSET @:fired 1 1, HSET @:lanes 1 1, HSET @:part:1:follow_ups 1 1,
  HSETNX @:job:1 1 1, HSTRLEN @:active:1 1, LINDEX @:claim:1 0, LLEN @, LPOP @:claim:1, LPOS @:claim:1 1, LPUSH @ 1, LPUSH @:lane:0:1 1,
  LRANGE @:starts:1 0 1, LRANGE @:starts:1:1 0 1, LREM @ 0 1, LSET @:claim:1 0 1, PERSIST @:part:1,
  PEXPIRE @:result:1 1, PTTL @:counts, PUBLISH @:room:1 1, PUBLISH @:wake:1 1, PUBSUB NUMSUB @:events,
  RENAME @:job:1 @:active:1, RENAME @:lanes:names @:trash:lanes, RENAME @:result:1 @:older_result:1,
  RPOP @:lane:0:1, RPOP @:leaving:1, RPOP @:trash, RPOP @:trash:suspects, RPOPLPUSH @ @:claim:1,
  RPOPLPUSH @:claim:1 @:suspects, RPOPLPUSH @:lane:0:1 @:claim:1, RPOPLPUSH @:suspects @:claim:1, RPUSH @ 1,
  RPUSH @:lane:0:1 1, SADD @:cancelling 1, SADD @:claims:1 1, SADD @:limited 1, SADD @:part:1:members 1,
  DEL @:done:1, GET @:done_id:1, HINCRBY @:done_total 1 1, HMGET @:tag_marks 1, PEXPIRE @:tag:1 1, ZPOPMIN @:done,
  SADD @:twins:1 1, SCARD @:blocked, SET @:ended:1 1, SET @:paused 1, SET @:taken:1 1, SETRANGE @:history10 0 1,
  SINTER @:claims:1 @:cancelling, SISMEMBER @:claims:1 1, SMEMBERS @:claims:1, SMISMEMBER @:claims:1 1,
  SORT @:claims:1 STORE @:leaving:1, SORT_RO @:claims:1, SPOP @:hungry, SPOP @:trash:blocked,
  SRANDMEMBER @:part:1:members 1, SREM @:blocked 1, SREM @:part:1:members 1, SSCAN @:twins:1 0,
  STRLEN @:history, TIME, ZADD @:batches 1 1, ZADD @:broken 1 1, ZADD @:failed 1 1, ZADD @:lanes:ring 1 1,
  ZADD @:result_ttls 1 1, ZCARD @:due, ZCOUNT @:due 0 0, ZPOPMIN @:trash:due,
  ZPOPMIN @:trash:suspended, ZRANGE @:due 0 0,
  ZRANGE @:trash:lanes 0 0, ZRANGEBYLEX @:lanes:names - +, ZRANGEBYSCORE @:due 0 0,
  ZRANGEBYSCORE @:lanes:opens 0 0, ZREM @:due 1, ZREM @:lanes:held 1, ZREM @:suspended 1, ZREVRANGE @:lanes:idle 0 0, ZSCORE @:lanes:ring 1
]]

-- Returns the error that names the commands the caller's user may not run. Returns nil if there are none, or if the server
-- cannot be asked.
local function missing_rights(base)
  local missing = {}
  for example in string.gmatch(redis.acl_check_cmd and RIGHTS or '', '[^,]+') do
    local words = {}
    for word in string.gmatch(example, '%S+') do
      words[#words + 1] = string.sub(word, 1, 1) == '@' and base .. string.sub(word, 2) or word
    end
    local known, may = pcall(redis.acl_check_cmd, unpack(words))
    if not (known and may) then
      missing[#missing + 1] = table.concat(words, ' ')
    end
  end
  if #missing == 0 then
    return nil
  end
  return redis.error_reply('NOPERM the user may not: ' .. table.concat(missing, ', '))
end

-- start_work: admits a worker to a queue, with the handler options for its recovery, if it has all rights there.
-- ARGV[4] worker id
-- ARGV[5] max_stalls deaths of workers; at this number the task fails
-- ARGV[6] keep_failed records, 0: none
-- ARGV[7] on_failure 1: a failure handler is registered
-- ARGV[8] result_ttl ms for which results are kept, - if they are not
-- ARGV[9] last number of a start request that the worker sent to this queue before
-- ARGV[10] limits text of limits.lua, empty: none, *: the worker declares nothing
-- ARGV[11] lanes msgpack of lanes.lua, empty: none, *: the worker declares nothing
-- ARGV[12] options JSON, other options of the handler, for people; empty: not known
-- ARGV[13] deploy number of the version of its application, 0: none
-- ARGV[14] secret with which scripts prove to the worker that they cancel one of its claims; empty: none
-- ARGV[15] handoffs 1: the worker takes tasks that come with their wake-up
-- RETURNS ok changed: 1 if other limits hold now, 2 if only the workers' rules of lanes are others, else 0 | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not put a worker back that left
-- NUMBERED
-- FLAGS allow-oom
local function start_work()
  local queue = KEYS[1]
  local worker, max_stalls = ARGV[4], ARGV[5]
  local keep_failed, on_failure, result_ttl, last, limits = ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10]
  local lanes, options, deploy, secret, handoffs = ARGV[11], ARGV[12], ARGV[13], ARGV[14], ARGV[15]
  local workers, policy = queue .. ':workers', queue .. ':policy:' .. worker

  local missing = missing_rights(queue)
  if missing then
    return missing
  end
  local admission, result_ttls = admission_of(workers, worker), queue .. ':result_ttls'
  assert(limits == '*' or are_limits(limits), 'limits must be like 10 100/60000')
  if lanes ~= '*' and declares_other_lanes(queue, lanes) then
    declared_lanes(lanes)
    check_types(queue)
    check_lane_types(queue)
  end
  redis.call('ZCARD', result_ttls)
  redis.call('HLEN', policy)
  local changed = limits ~= '*' and store_limits(queue, 'declared', limits ~= '' and limits) and 1 or 0
  if lanes ~= '*' and declare_lanes(queue, lanes, now_ms()) and changed == 0 then
    changed = 2
  end
  redis.call('HSET', policy, 'max_stalls', max_stalls, 'keep_failed', keep_failed, 'on_failure', on_failure)
  set_field(policy, 'options', options ~= '' and options)
  set_field(policy, 'deploy', whole_number(deploy, 0) > 0 and deploy)
  set_field(policy, 'secret', secret ~= '' and secret)
  set_field(policy, 'handoffs', handoffs == '1' and handoffs)
  if result_ttl == '-' then
    redis.call('HDEL', policy, 'result_ttl')
  else
    redis.call('HSET', policy, 'result_ttl', result_ttl)
  end
  if (tonumber(result_ttl) or 0) > 0 then
    redis.call('ZADD', result_ttls, result_ttl, worker)
  else
    redis.call('ZREM', result_ttls, worker)
  end
  if not admission then
    redis.call('HSET', workers, worker, last .. ' 0 0 0')
  end
  return {'ok', changed}
end

-- stop_work: ends the admission of a worker to a queue, then gives its claims back to the front in their old order. Their
-- attempts are not counted. Call again while it returns more.
-- ARGV[4] worker id
-- ARGV[5] limit claims given back in one call
-- RETURNS ok given cancelled aside | more given cancelled aside | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not remove a worker that came back
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function stop_work()
  local queue = KEYS[1]
  local worker, limit = ARGV[4], tonumber(ARGV[5])

  return release_all(queue, worker, limit, '')
end

-- find_claims: looks at some keys of the server, and returns the claims among them that are not new. Which of them no worker
-- holds, adopt_claims finds out.
-- ARGV[1] cursor of the call before; 0 for the first
-- ARGV[2] budget, how many keys to look at, approximately
-- ARGV[3] pattern of the keys of claims
-- ARGV[4] older_ms age of the claims that are returned
-- RETURNS ok run_id cursor key...: run_id is that of the server that was asked, a node of a cluster; cursor of the next call (0: this
--   was the last) | denied: the user may not look at the names of all keys
-- RESEND safe: it only reads
-- FLAGS no-writes
local function find_claims()
  local queue = KEYS[1]
  local cursor, budget, pattern, older_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

  redis.call('EXISTS', queue) -- it names the node
  local may = not redis.acl_check_cmd or redis.acl_check_cmd('SCAN', cursor)
  if not may then
    return {'denied'}
  end
  local info, found = redis.pcall('INFO', 'server'), redis.call('SCAN', cursor, 'MATCH', pattern, 'COUNT', budget)
  local now = now_ms()
  local reply = {'ok', type(info) == 'string' and string.match(info, 'run_id:(%w+)') or '', found[1]}
  for _, key in ipairs(found[2]) do
    local claim = tonumber(string.match(key, '}[%l-]*:claim:(%d+)$') or '')
    if claim and math.abs(now - claim / 1000) >= older_ms then -- also one from before the clock was set back
      reply[#reply + 1] = key
    end
  end
  return reply
end

-- adopt_claims: gives claims that no worker holds to a worker id that is never registered, so that they are recovered like those of a
-- dead worker. Another program has removed them from the set of their worker, or the server has evicted it. Claims that a
-- worker holds stay.
-- ARGV[1] worker id that gets them, and whose set of claims is given
-- ARGV[2] known workers of the registry, one per line: they hold claims even if the queue has lost their admission
-- ARGV[3..] lost claims, 1000 at most, which may be lost
-- RETURNS ok adopted, how many
-- RESEND safe: a copy finds that they are held
-- FLAGS allow-oom
local function adopt_claims()
  local queue = KEYS[1]
  local worker, known = ARGV[1], ARGV[2]
  local workers, claims = queue .. ':workers', queue .. ':claims:' .. worker

  redis.call('SCARD', claims)
  local named, holders, held, adopted = {}, redis.call('HKEYS', workers), {}, 0
  for i = 3, #ARGV do
    local lost = ARGV[i]
    named[#named + 1] = lost
  end
  for holder in string.gmatch(known, '[^\n]+') do
    holders[#holders + 1] = holder
  end
  holders[#holders + 1] = worker
  for _, holder in ipairs(holders) do
    for i, is_held in ipairs(own(redis.pcall('SMISMEMBER', queue .. ':claims:' .. holder, unpack(named))) or {}) do
      held[i] = held[i] or is_held == 1
    end
  end
  for i, claim in ipairs(named) do
    if not held[i] and redis.call('EXISTS', queue .. ':claim:' .. claim) == 1 then
      adopted = adopted + redis.call('SADD', claims, claim)
    end
  end
  if adopted > 0 then
    redis.call('HSET', workers, worker, LEAVING)
  end
  return {'ok', adopted}
end

-- fail_worker: ends the admission of a dead worker to a queue. Its claims go back to the front in their old order, each
-- with one stall more. A task becomes a suspect one stall before the limit, and fails at it. Call again while it returns more.
-- ARGV[1] worker id
-- ARGV[2] limit claims given back in one call
-- RETURNS ok given cancelled aside | more given cancelled aside
-- RESEND safe: worker ids are never used again, so a copy finds what is left or nothing
-- GROUP seldom
-- FLAGS allow-oom
local function fail_worker()
  local queue = KEYS[1]
  local worker, limit = ARGV[1], tonumber(ARGV[2])

  return release_all(queue, worker, limit, 'stalls')
end

-- list_policies: the handler options with which workers serve a queue, those of workers with the same options together.
-- ARGV[1] limit workers to look at
-- ARGV[2] named workers that are named of each group, at most
-- RETURNS ok left_out group...: left_out is how many workers were not looked at; a group is how many workers it has, their
--   max_stalls, keep_failed, on_failure, result_ttl and options (false: not stored), and the first of the workers by id
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_policies()
  local queue = KEYS[1]
  local limit, named = tonumber(ARGV[1]), tonumber(ARGV[2])
  local workers = queue .. ':workers'

  local serving, groups = (own(redis.pcall('HKEYS', workers)) or {}), {}
  table.sort(serving)
  local reply = {'ok', math.max(0, #serving - limit)}
  for i = 1, math.min(limit, #serving) do
    local kept = own(redis.pcall('HMGET', queue .. ':policy:' .. serving[i], 'max_stalls', 'keep_failed', 'on_failure',
      'result_ttl', 'options')) or {false, false, false, false, false}
    local key = cmsgpack.pack(kept)
    if not groups[key] then
      groups[key] = {0, kept, {}}
      reply[#reply + 1] = groups[key]
    end
    local group = groups[key]
    group[1] = group[1] + 1
    if #group[3] < named then
      group[3][#group[3] + 1] = serving[i]
    end
  end
  return reply
end
