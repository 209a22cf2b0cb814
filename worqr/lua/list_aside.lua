#!lua flags=no-writes
-- list_aside: one page of the dead-letter queue, newest first, after the end of the last page.
-- KEYS[1] queue LIST
-- KEYS[2] list ZSET
-- ARGV[1] limit records; 0: only the number
-- ARGV[2] budget records to look at
-- ARGV[3] max_bytes bytes of payload after which no further record is listed
-- ARGV[4] after claim at which the last page ended, - for the first
-- ARGV[5] after_ms its time
-- ARGV[6] before ms, only older ones; +inf: all
-- ARGV[7] error_type name of the error, whole or its last part; empty: any
-- ARGV[8] bare 1: only the claims
-- ARGV[9] since ms, only newer ones; -inf: all
-- ARGV[10] head bytes of a payload that are listed; -1: all of it
-- ARGV[11] batch token of the batch whose members are listed; empty: all
-- RETURNS ok after after_ms number entry... | more after after_ms number entry...: number is how many records of these times are
--   on this page and behind it, of any error_type; an entry is the claim, or claim and the record's names and values in turn,
--   and the size of the payload
-- RESEND safe: it only reads
local queue, list = KEYS[1], KEYS[2]
local limit, budget, max_bytes = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local after, after_ms, before, error_type, bare = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8] == '1'
local since, head, batch = ARGV[9], tonumber(ARGV[10]), ARGV[11]

local start = own(redis.pcall('ZCOUNT', list, before, '+inf')) or 0
if before == '+inf' then
  start = 0
end
if after ~= '-' then
  local rank = own(redis.pcall('ZREVRANK', list, after))
  start = math.max(start, rank and rank + 1 or (own(redis.pcall('ZCOUNT', list, '(' .. after_ms, '+inf')) or 0))
end
local last = own(redis.pcall('ZCOUNT', list, since, '+inf')) or 0
local reply, bytes, looked = {'ok', after, after_ms, math.max(last - start, 0)}, 0, 0
local page = limit > 0 and own(redis.pcall('ZREVRANGE', list, start, start + budget - 1, 'WITHSCORES')) or {}
for i = 1, #page, 2 do
  if #reply - 4 >= limit or bytes >= max_bytes or start + looked >= last then
    break
  end
  local claim, aside = page[i], queue .. ':aside:' .. page[i]
  local kind = error_type ~= '' and own(redis.pcall('HGET', aside, 'error_type')) or ''
  if batch ~= '' and string.match(own(redis.pcall('HGET', aside, 'batch')) or '', '^[^\n]+') ~= batch then
    kind = nil
  end
  if kind and (kind == error_type or string.sub(kind, -#error_type - 1) == '.' .. error_type) then
    local size = not bare and own(redis.pcall('HSTRLEN', aside, 'task')) or 0
    local record, copied = nil, 0
    if not bare then
      record, copied = dead_letter_entry(aside, size, head, max_bytes - bytes)
    end
    reply[#reply + 1] = {claim, record, size}
    bytes = bytes + copied
  end
  reply[2], reply[3], looked = claim, page[i + 1], looked + 1
end
if start + looked < last then
  reply[1] = 'more'
end
return reply
