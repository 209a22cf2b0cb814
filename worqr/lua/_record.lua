-- Returns a hash as a table; nil if it is empty, or not a hash.
local function read_hash(key)
  local flat = own(redis.pcall('HGETALL', key))
  if not flat or #flat == 0 then
    return nil
  end
  local fields = {}
  for i = 1, #flat, 2 do
    fields[flat[i]] = flat[i + 1]
  end
  return fields
end

-- Writes the table `fields` into the hash `key`. Another application's value is replaced: the key is the queue's own, and by
-- now the record may be the only copy of the job.
local function write_hash(key, fields)
  local flat = {}
  for name, value in pairs(fields) do
    flat[#flat + 1] = name
    flat[#flat + 1] = value
  end
  if not own(redis.pcall('HSET', key, unpack(flat))) then
    redis.call('DEL', key)
    redis.call('HSET', key, unpack(flat))
  end
end

local function record_of(base, item, id, claim, fields)
  return {item = item, job = id, id = id or new_id(base, claim), fields = fields, task = fields.task,
    failures = tonumber(fields.failures) or 0, stalls = tonumber(fields.stalls) or 0,
    timeouts = tonumber(fields.timeouts) or 0}
end

-- Returns what is known of the task under `claim`, read before anything is written; nil if there is no task, or a reference
-- without a record.
local function read_claim(base, claim)
  local item = own(redis.pcall('LINDEX', base .. ':claim:' .. claim, 0))
  if not item then
    return nil
  end
  local id = job_id(item)
  local fields = {task = item}
  if id then
    fields = read_hash(base .. ':active:' .. id)
  end
  return fields and fields.task and record_of(base, item, id, claim, fields) or nil
end
