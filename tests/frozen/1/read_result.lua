#!lua flags=no-writes
-- True if the dispatch `number` (0: whichever) is among those from `first` to `last`.
local function covers(number, first, last)
  return number == 0 or (number >= (tonumber(first) or 0) and number <= (tonumber(last) or 0))
end

-- The result that belongs to the dispatch `number` (0: the newest, which the older one is not, also if nothing was kept of it):
-- its key and how it ended, or nil.
local function ended_as(result, older_result, number)
  for _, key in ipairs({result, number ~= 0 and older_result or nil}) do
    local kept = redis.call('HMGET', key, 'outcome', 'first', 'last')
    if kept[1] and covers(number, kept[2], kept[3]) then
      return key, kept[1]
    end
  end
  return nil
end

-- The record of a job that has not ended: its key and which it is, active or job; of both the active one, unless the dispatch
-- `number` belongs to the other. nil if there is none; one that lies in the trash is none.
local function live_record(active, job, counts, number)
  local run = redis.call('HMGET', active, 'claim', 'first', 'last')
  if run[1] and covers(number, run[2], run[3]) then
    return active
  end
  local kept = redis.call('HMGET', job, 'queued', 'first', 'last')
  if kept[1] and covers(number, kept[2], kept[3])
    and tonumber(kept[1]) > (tonumber(redis.call('HGET', counts, 'cleared')) or 0) then
    return job
  end
  return nil
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

-- read_result: how a job ended; or that it has not, and whether its result will be kept.
-- KEYS[1] queue LIST
-- KEYS[2] job HASH
-- KEYS[3] active HASH
-- KEYS[4] result HASH
-- KEYS[5] older_result HASH
-- KEYS[6] counts HASH
-- ARGV[1] number of the dispatch whose result is wanted, 0: of the newest
-- RETURNS wait | never (it has not ended, and nothing will be kept) | gone | finished kind value |
--   failed type message traceback | cancelled reason
-- RESEND safe: it only reads
-- USES job result
local queue, job, active, result, older_result, counts = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local number = tonumber(ARGV[1])

local found, outcome = ended_as(result, older_result, number)
-- A dispatch that has ended and lives all the same failed, and was put back.
local live = (number == 0 or not found or outcome == 'failed') and live_record(active, job, counts, number)
if live then
  local ttl = tonumber(redis.call('HGET', live, 'result_ttl')) or any_result_ttl(queue)
  return {ttl > 0 and 'wait' or 'never'}
end
if not found then
  return {'gone'}
elseif outcome == 'finished' then
  local value = redis.call('HMGET', found, 'kind', 'value')
  return {'finished', value[1], value[2]}
elseif outcome == 'failed' then
  local told = redis.call('HMGET', found, 'error_type', 'error_message', 'error_traceback')
  return {'failed', told[1], told[2], told[3]}
end
return {'cancelled', redis.call('HGET', found, 'reason')}
