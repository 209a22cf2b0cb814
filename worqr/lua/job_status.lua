#!lua flags=no-writes
-- job_status: the state of a job and its attempts, also after its end.
-- KEYS[1] job HASH
-- KEYS[2] active HASH
-- KEYS[3] result HASH
-- KEYS[4] older_result HASH
-- KEYS[5] counts HASH
-- KEYS[6] dead_letter_index HASH
-- ARGV[1] number of the dispatch that is meant, 0: the newest
-- ARGV[2] id of the job
-- ARGV[3] aside_stem prefix of the keys of dead-letter records
-- RETURNS waiting fields | due fields | blocked fields | active fields | finished fields | failed fields | cancelled fields |
--   gone; fields are claim worker run_at progress message failures attempts error_type error_message, each false if not known
-- RESEND safe: it only reads
local job, active, result, older_result = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local counts, dead_letter_index = KEYS[5], KEYS[6]
local number, id, aside_stem = tonumber(ARGV[1]), ARGV[2], ARGV[3]

-- The fields of the record `key`. `tries`: attempts that the three counters do not count.
local function status_of(status, key, tries)
  local kept = own(redis.pcall('HMGET', key, 'claim', 'worker', 'run_at', 'progress', 'message', 'failures', 'stalls',
    'timeouts', 'error_type', 'error_message')) or {}
  local attempts = tries + whole_number(kept[6], 0) + whole_number(kept[7], 0) + whole_number(kept[8], 0)
  return {status, kept[1], kept[2], kept[3], kept[4], kept[5], kept[6], attempts, kept[9], kept[10]}
end

local live = find_live_record(active, job, counts, number)
if live == active then
  return status_of('active', live, 1)
end
local state = live and redis.call('HGET', live, 'state')
if state == 'waiting' or state == 'due' or state == 'blocked' then
  return status_of(state, live, 0)
end
local found, outcome = find_result(result, older_result, number)
if found then
  local kept = redis.call('HMGET', found, 'progress', 'message', 'failures', 'attempts', 'error_type', 'error_message')
  return {outcome, false, false, false, kept[1], kept[2], kept[3], whole_number(kept[4], 1), kept[5], kept[6]}
end
local aside = find_dead_letter(dead_letter_index, aside_stem, id, number)
if aside then
  local reply = status_of('failed', aside, redis.call('HGET', aside, 'reason') == 'broken' and 1 or 0)
  reply[2], reply[3], reply[4] = false, false, false
  return reply
end
return {'gone'}
