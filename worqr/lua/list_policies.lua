#!lua flags=no-writes
-- list_policies: the handler options with which workers serve a queue, those of workers with the same options together.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- ARGV[1] limit workers to look at
-- ARGV[2] named workers that are named of each group, at most
-- RETURNS ok left_out group...: left_out is how many workers were not looked at; a group is how many workers it has, their
--   max_stalls, keep_failed, on_failure, result_ttl and options (false: not stored), and the first of the workers by id
-- RESEND safe: it only reads
local queue, workers = KEYS[1], KEYS[2]
local limit, named = tonumber(ARGV[1]), tonumber(ARGV[2])

local serving, groups = (own(redis.pcall('HKEYS', workers)) or {}), {}
table.sort(serving)
local reply = {'ok', math.max(0, #serving - limit)}
for i = 1, math.min(limit, #serving) do
  local kept = own(redis.pcall('HMGET', queue .. ':policy:' .. serving[i], 'max_stalls', 'keep_failed', 'on_failure',
    'result_ttl', 'options')) or {false, false, false, false, false}
  local key = cmsgpack.pack(kept)
  if not groups[key] then
    groups[key] = {0, kept, {}}
    reply[#reply + 1] = groups[key]
  end
  local group = groups[key]
  group[1] = group[1] + 1
  if #group[3] < named then
    group[3][#group[3] + 1] = serving[i]
  end
end
return reply
