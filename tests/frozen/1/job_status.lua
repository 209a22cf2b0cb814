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
