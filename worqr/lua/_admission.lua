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
  return {worker = worker, max_stalls = tonumber(kept[1]) or 3, keep_failed = tonumber(kept[2] or '1000'),
    on_failure = kept[3] == '1', result_ttl = tonumber(kept[4]) or 0}
end

-- The commands that a worker's scripts run on a queue, each with example keys; @ is the queue's base. A script that is
-- refused a command in its middle has already done part of its work, and a task that it held is lost. So a worker whose
-- user lacks a right may not serve the queue. The script asks the server and calls none of them. Each has as many arguments
-- as a call would need.
local RIGHTS = [[
  DEL @:claim:1, DEL @:lanes, DEL @:lanes:idle, DEL @:policy:1, EXISTS @:paused, EXPIRE @:counts 1,
  GET @:taken:1, GETRANGE @:history 0 1, HDEL @:lanes:claims 1, HDEL @:outbox 1, HDEL @:workers 1,
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
  SADD @:twins:1 1, SCARD @:blocked, SET @:paused 1, SET @:taken:1 1, SETRANGE @:history10 0 1,
  SINTER @:claims:1 @:cancelling, SISMEMBER @:claims:1 1, SMEMBERS @:claims:1, SMISMEMBER @:claims:1 1,
  SORT @:claims:1 STORE @:leaving:1, SORT_RO @:claims:1, SPOP @:hungry, SPOP @:trash:blocked,
  SRANDMEMBER @:part:1:members 1, SREM @:blocked 1, SREM @:part:1:members 1, SSCAN @:twins:1 0,
  STRLEN @:history, TIME, ZADD @:batches 1 1, ZADD @:broken 1 1, ZADD @:failed 1 1, ZADD @:lanes:ring 1 1,
  ZADD @:result_ttls 1 1, ZCARD @:due, ZCOUNT @:due 0 0, ZPOPMIN @:trash:due, ZRANGE @:due 0 0,
  ZRANGE @:trash:lanes 0 0, ZRANGEBYLEX @:lanes:names - +, ZRANGEBYSCORE @:due 0 0,
  ZRANGEBYSCORE @:lanes:opens 0 0, ZREM @:due 1, ZREM @:lanes:held 1, ZREVRANGE @:lanes:idle 0 0, ZSCORE @:lanes:ring 1
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
