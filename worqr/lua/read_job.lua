#!lua flags=no-writes
-- read_job: everything that is stored about one id: its run, the job that waits, its last results, and its dead-letter records.
-- KEYS[1] queue LIST
-- KEYS[2] job HASH
-- KEYS[3] active HASH
-- KEYS[4] result HASH
-- KEYS[5] older_result HASH
-- KEYS[6] counts HASH
-- KEYS[7] dead_letter_index HASH
-- KEYS[8] cancelling SET
-- KEYS[9] taken STRING
-- ARGV[1] id of the job
-- ARGV[2] head bytes of each payload that are returned
-- ARGV[3] max_bytes bytes of payload that are read; a longer one is returned as empty
-- ARGV[4] most dead-letter records, the newest first; and other jobs that were plain tasks with this payload
-- RETURNS ok cancelling reserved run job results records twins: cancelling is 1 if the run is to be cancelled, reserved ms until the id
--   is free again (-1: it is not reserved); run and job are records, or false; results are the newest and the one before
--   it, each the ms until it expires, then names and values in turn, or false; a record is the bytes of its payload, then names
--   and values in turn, without what the job saved; twins are ids
-- RESEND safe: it only reads
local queue, job, active, result, older_result, counts = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local dead_letter_index, cancelling, taken = KEYS[7], KEYS[8], KEYS[9]
local id, head, max_bytes, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

-- Returns the record `key`. A hash field can only be read whole, so that the payload is read if there is room for it.
local function read_record(key)
  local size = own(redis.pcall('HSTRLEN', key, 'task'))
  if not size or redis.call('EXISTS', key) == 0 then
    return false
  end
  local record, may_read = {size}, size <= max_bytes
  max_bytes = max_bytes - (may_read and size or 0)
  for _, name in ipairs(redis.call('HKEYS', key)) do
    if not is_large_saved(name) then
      local value = (name ~= 'task' or may_read) and redis.call('HGET', key, name) or ''
      record[#record + 1], record[#record + 2] = name, name == 'task' and string.sub(value, 1, head) or value
    end
  end
  return record
end

local RESULT = {'outcome', 'first', 'last', 'kind', 'reason', 'failures', 'attempts', 'progress', 'message',
  'error_type', 'error_message', 'error_traceback', 'error_fields'} -- all but the value

local run = own(redis.pcall('HEXISTS', active, 'claim')) == 1 and read_record(active)
local marked = run and own(redis.pcall('SISMEMBER', cancelling, redis.call('HGET', active, 'claim'))) or 0
local queued, cleared = own(redis.pcall('HGET', job, 'queued')) or false, whole_number(own(redis.pcall('HGET', counts, 'cleared')), 0, NEVER)
local kept = queued and whole_number(queued, NEVER, NEVER) > cleared and read_record(job)
local results, records = {}, {}
for _, key in ipairs({result, older_result}) do
  local facts = (own(redis.pcall('HEXISTS', key, 'outcome')) or 0) == 1 and {redis.call('PTTL', key)}
  for _, name in ipairs(facts and RESULT or {}) do
    facts[#facts + 1], facts[#facts + 2] = name, redis.call('HGET', key, name)
  end
  results[#results + 1] = facts
end
local claim = own(redis.pcall('HGET', dead_letter_index, id))
while claim and #records < most do
  local record = read_record(queue .. ':aside:' .. claim)
  records[#records + 1] = record or nil
  claim = record and redis.call('HGET', queue .. ':aside:' .. claim, 'older')
end
local digest = run and redis.call('HGET', active, 'twin') or kept and redis.call('HGET', job, 'twin')
local scanned = digest and own(redis.pcall('SSCAN', queue .. ':twins:' .. digest, '0', 'COUNT', most + 1))
local twins = {}
for _, twin in ipairs(scanned and scanned[2] or {}) do
  if twin ~= id and #twins < most then
    twins[#twins + 1] = twin
  end
end
return {'ok', marked, math.max(-1, redis.call('PTTL', taken)), run, kept, results, records, twins}
