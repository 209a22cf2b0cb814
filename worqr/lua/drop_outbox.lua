#!lua flags=allow-oom
-- drop_outbox: deletes delivered messages. A topic that has a newer message keeps it.
-- KEYS[1] outbox HASH
-- ARGV[1..] delivered topics and messages, in turn
-- RETURNS ok
-- RESEND safe: a copy deletes only the same messages
local outbox = KEYS[1]

for i = 1, #ARGV, 2 do
  local delivered, message = ARGV[i], ARGV[i + 1]
  if redis.call('HGET', outbox, delivered) == message then
    redis.call('HDEL', outbox, delivered)
  end
end
return {'ok'}
