#!lua flags=no-writes
-- take_outbox: messages of a queue for other queues, which are to be delivered and then dropped.
-- KEYS[1] outbox HASH
-- ARGV[1] limit messages, about
-- RETURNS ok entry...: an entry is the topic, the message as it is stored, and its parts: report, home, id, token, part, version,
--   closed and counts; cancel, part, token, version, home, id, keep and reason; release, queue, token, kind,
--   ending and facts (msgpack map); or keep, queue, token and ms
-- RESEND safe: it only reads
local outbox = KEYS[1]
local limit = tonumber(ARGV[1])

local reply, cursor = {'ok'}, '0'
repeat
  local found = redis.call('HSCAN', outbox, cursor, 'COUNT', limit)
  cursor = found[1]
  for i = 1, #found[2], 2 do
    reply[#reply + 1] = {found[2][i], found[2][i + 1], cmsgpack.unpack(found[2][i + 1])}
  end
until cursor == '0' or #reply > limit
return reply
