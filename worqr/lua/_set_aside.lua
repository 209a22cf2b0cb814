-- USES counts end_claim fence record result wake
-- Gives the failure handler of the queue its job: the payload as it is, and beside it what became of it.
local function post_failure(base, claim, task, facts)
  local failures = base .. '-fail'
  local id, fence = '@f' .. claim, next_fence(failures)
  note_fence(failures, fence)
  local number = digits(fence)
  redis.call('HSET', failures .. ':job:' .. id, 'task', task, 'failed', cmsgpack.pack(facts), 'run_at', facts.at,
    'queued', number, 'first', number, 'last', number)
  put_in_line(failures, id, 0, 0, 'back')
  tally(failures, 'enqueued', 1)
  wake(failures, 1)
end

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
