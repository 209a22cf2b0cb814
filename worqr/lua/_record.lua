-- USES reference
-- What is known of the task under `claim`, read before anything is written; nil if nothing lies there, or a reference to
-- nothing.
local function read_claim(base, claim)
  local item = redis.call('LINDEX', base .. ':claim:' .. claim, 0)
  if not item then
    return nil
  end
  local id = job_id(item)
  if not id then
    return {item = item, task = item, id = '', failures = 0, stalls = 0, timeouts = 0}
  end
  local kept = redis.call('HMGET', base .. ':active:' .. id, 'task', 'failures', 'stalls', 'timeouts')
  if not kept[1] then
    return nil
  end
  return {item = item, job = id, id = id, task = kept[1], failures = tonumber(kept[2]) or 0,
    stalls = tonumber(kept[3]) or 0, timeouts = tonumber(kept[4]) or 0}
end

-- Makes the raw task under `claim` a job that waits; `record.item` becomes its reference.
local function become_job(base, claim, record)
  local digest = redis.sha1hex(record.task)
  record.job = '@' .. claim
  record.item = MARKER .. record.job
  redis.call('HSET', base .. ':job:' .. record.job, 'task', record.task, 'twin', digest)
  redis.call('SADD', base .. ':twins:' .. digest, record.job)
end

-- Makes the record wait again, with the counter that this return costs, if it costs one. `queued` is the fence number of its
-- place in line: one that is not above the number of the last clearing lies in the trash.
local function record_return(base, claim, record, counter)
  if record.job then
    local job = base .. ':job:' .. record.job
    redis.call('RENAME', base .. ':active:' .. record.job, job)
    redis.call('HDEL', job, 'claim', 'worker')
  elseif counter ~= '' then
    become_job(base, claim, record)
  end
  if record.job then
    redis.call('HSET', base .. ':job:' .. record.job, 'queued', claim)
  end
  if counter ~= '' then
    redis.call('HSET', base .. ':job:' .. record.job, counter, record[counter])
  end
end
