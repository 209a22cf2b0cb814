#!lua flags=allow-oom
-- put_follow_up: enqueues a follow-up that this queue holds for a batch of another home, once for each ending.
-- KEYS[1] queue LIST
-- KEYS[2] follow_ups HASH
-- ARGV[1] token of the batch
-- ARGV[2] kind then or otherwise
-- ARGV[3] ending its number
-- ARGV[4] facts of the ending (msgpack map): added, finished, failed, cancelled, ended_at, cancel_reason
-- RETURNS ok | stored (before) | unknown (this queue does not hold it)
-- RESEND safe: fenced by the number of the ending
local queue, follow_ups = KEYS[1], KEYS[2]
local token, kind, ending, facts = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

check_types(queue)
local known, ended = pcall(cmsgpack.unpack, facts)
if not (known and type(ended) == 'table' and is_random(token) and is_digits(ending) and tonumber(ending) > 0) then
  return redis.error_reply('ERR the token, the ending and the facts of a follow-up cannot be that')
end
local kept = own(redis.pcall('HMGET', follow_ups, 'home', 'id', 'meta', kind .. '_options', kind .. '_task',
  'ending ' .. ending)) or {}
local o, task = follow_up_options(kept[4]), kept[5]
if kept[6] then
  return {'stored'}
elseif not (o and task and is_line(kept[1]) and is_line(kept[2])) then
  return {'unknown'}
end
redis.call('HSET', follow_ups, 'ending ' .. ending, '1')
local told = {home = kept[1], id = kept[2], meta = kept[3] or nil, token = token, endings = tonumber(ending)}
for _, name in ipairs({'added', 'finished', 'failed', 'cancelled'}) do
  told[name] = valid_option('whole', ended[name]) and ended[name] or 0
end
told.ended_at = is_digits(ended.ended_at) and ended.ended_at or digits(now_ms())
local reason = ended.cancel_reason
told.cancel_reason = type(reason) == 'string' and is_utf8(reason) and reason or nil
local id = follow_up_id(queue, token, kind, told.endings)
wake(queue, enqueue_follow_up(queue, id, o, task, told, false) + count_members(queue))
return {'ok'}
