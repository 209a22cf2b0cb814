-- Sets the field `name` of the hash `key`, or deletes it where `value` is false. Does nothing if the key is not a hash.
local function set_field(key, name, value)
  if value then
    own(redis.pcall('HSET', key, name, value))
  else
    own(redis.pcall('HDEL', key, name))
  end
end

-- Deletes the dead-letter record under `claim`. The records of one id are linked to their neighbours, and the index has the
-- newest of them, so that each can be deleted without a search.
local function forget_aside(base, claim)
  local aside = base .. ':aside:'
  local kept = own(redis.pcall('HMGET', aside .. claim, 'id', 'older', 'newer')) or {}
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

-- Writes the dead-letter record under `claim` and lists it, if it is to be kept; the oldest records above the cap are deleted.
local function list_aside(base, claim, record, facts, how)
  local aside, list, keep = base .. ':aside:' .. claim, base .. ':' .. how.kind, tonumber(how.keep)
  if how.kind == 'broken' or keep > 0 then
    if record.job then
      redis.call('RENAME', base .. ':active:' .. record.id, aside)
      redis.call('HDEL', aside, 'claim', 'state', 'queued', 'suspect', 'cancel_reason')
    end
    facts.task, facts.older = record.task, redis.call('HGET', base .. ':aside', record.id) or nil
    if facts.older then
      set_field(base .. ':aside:' .. facts.older, 'newer', claim)
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
