#!lua flags=no-writes
-- job_status: where a job is.
-- KEYS[1] job HASH
-- KEYS[2] active HASH
-- KEYS[3] result HASH
-- KEYS[4] older_result HASH
-- KEYS[5] counts HASH
-- KEYS[6] aside_index HASH
-- ARGV[1] number of the dispatch that is meant, 0: the newest
-- ARGV[2] id of the job
-- ARGV[3] aside_stem what the key of a record set aside begins with
-- RETURNS waiting fields | due fields | blocked fields | active fields | finished | failed | cancelled | gone; fields are claim
--   worker run_at progress message failures, false for what there is not
-- RESEND safe: it only reads
-- USES job
local job, active, result, older_result, counts, aside_index = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local number, id, aside_stem = tonumber(ARGV[1]), ARGV[2], ARGV[3]

local live = live_record(active, job, counts, number)
if live then
  local kept = redis.call('HMGET', live, 'state', 'claim', 'worker', 'run_at', 'progress', 'message', 'failures')
  return {kept[1], kept[2], kept[3], kept[4], kept[5], kept[6], kept[7]}
end
local found, outcome = ended_as(result, older_result, number)
if found then
  return {outcome}
end
local claim = redis.call('HGET', aside_index, id)
local aside = claim and redis.call('HMGET', aside_stem .. claim, 'task', 'first', 'last')
if aside and aside[1] and (not aside[2] or covers(number, aside[2], aside[3])) then
  return {'failed'}
end
return {'gone'}
