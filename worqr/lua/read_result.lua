#!lua flags=no-writes
-- read_result: returns how a job ended; or that it has not, and whether its result will be kept.
-- KEYS[1] queue LIST
-- KEYS[2] job HASH
-- KEYS[3] active HASH
-- KEYS[4] result HASH
-- KEYS[5] older_result HASH
-- KEYS[6] counts HASH
-- KEYS[7] dead_letter_index HASH
-- ARGV[1] number of the dispatch whose result is wanted, 0: of the newest
-- ARGV[2] id of the job
-- ARGV[3] aside_stem prefix of the keys of dead-letter records
-- RETURNS wait | never (it has not ended, and nothing will be kept) | gone | replaced (gone, and there is a newer dispatch) |
--   finished kind value | failed type message traceback fields | cancelled reason
-- RESEND safe: it only reads
local queue, job, active, result, older_result, counts = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local dead_letter_index = KEYS[7]
local number, id, aside_stem = tonumber(ARGV[1]), ARGV[2], ARGV[3]

local found, outcome = find_result(result, older_result, number)
-- A dispatch that has ended and still has a record failed, and was retried.
local live = (number == 0 or not found or outcome == 'failed') and find_live_record(active, job, counts, number)
if live then
  local ttl = whole_number(redis.call('HGET', live, 'result_ttl')) or tolerant(function() return longest_result_ttl(queue) end) or 0
  return {ttl > 0 and 'wait' or 'never'}
end
if not found then
  -- Whatever its result_ttl, a failed job is known as long as its record is in the dead-letter queue.
  found, outcome = find_dead_letter(dead_letter_index, aside_stem, id, number), 'failed'
end
if not found then
  for _, key in ipairs(number > 0 and {active, job, result} or {}) do
    if whole_number(own(redis.pcall('HGET', key, 'first')), 0, NEVER) > number then
      return {'replaced'}
    end
  end
  return {'gone'}
elseif outcome == 'finished' then
  local value = redis.call('HMGET', found, 'kind', 'value')
  return {'finished', value[1], value[2]}
elseif outcome == 'failed' then
  local error = redis.call('HMGET', found, 'error_type', 'error_message', 'error_traceback', 'error_fields')
  return {'failed', error[1], error[2], error[3], error[4]}
end
return {'cancelled', redis.call('HGET', found, 'reason')}
