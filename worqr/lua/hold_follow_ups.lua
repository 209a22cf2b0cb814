#!lua
-- hold_follow_ups: stores follow-ups of a batch whose home is another queue in their own queue, before the batch is opened. The producer
-- sends it, so it needs the right to write to this queue; the messages that enqueue a follow-up later carry no task. Kept for
-- `kept_for`, unless the home says longer.
-- KEYS[1] queue LIST
-- KEYS[2] follow_ups HASH
-- ARGV[1] home base of its queue
-- ARGV[2] id of the batch
-- ARGV[3] kept_for ms
-- ARGV[4..] facts names and values: then_options and otherwise_options (msgpack map), then_task and otherwise_task (bytes), meta (JSON)
-- RETURNS ok
-- RESEND safe: a copy changes nothing
local queue, follow_ups = KEYS[1], KEYS[2]
local home, id, kept_for = ARGV[1], ARGV[2], ARGV[3]

local FACTS = {then_options = 'packed', then_task = 'string', otherwise_options = 'packed', otherwise_task = 'string',
  meta = 'meta'}

check_types(queue)
if not (is_line(home) and is_line(id) and is_digits(kept_for)) then
  return redis.error_reply('ERR the home, the id and kept_for of a follow-up cannot be that')
end
local fields = {home = home, id = id}
for i = 4, #ARGV, 2 do
  local fact, value = ARGV[i], ARGV[i + 1]
  local kind = FACTS[fact]
  if not (kind and value and (kind == 'packed' and follow_up_options(value) or valid_option(kind, value))) then
    return redis.error_reply('ERR the fact ' .. fact .. ' of a follow-up cannot be that')
  end
  fields[fact] = value
end
if redis.call('HLEN', follow_ups) == 0 then
  write_hash(follow_ups, fields)
  redis.call('PEXPIRE', follow_ups, kept_for)
end
return {'ok'}
