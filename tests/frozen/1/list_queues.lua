#!lua flags=no-writes
-- list_queues: the names of all queues seen, and of those that registered or dying workers serve.
-- KEYS[1] queues SET
-- KEYS[2] registered SET
-- KEYS[3] dying SET
-- ARGV[1] work_map_stem text that a worker id completes to its WorkMap
-- RETURNS ok queue... (each once)
-- RESEND safe: it only reads
local queues, registered, dying = KEYS[1], KEYS[2], KEYS[3]
local work_map_stem = ARGV[1]

local seen, reply = {}, {'ok'}
local function note(key)
  for _, queue in ipairs(redis.call('SMEMBERS', key)) do
    if not seen[queue] then
      seen[queue] = true
      reply[#reply + 1] = queue
    end
  end
end

note(queues)
for _, worker in ipairs(redis.call('SMEMBERS', registered)) do
  note(work_map_stem .. worker)
end
for _, worker in ipairs(redis.call('SMEMBERS', dying)) do
  note(work_map_stem .. worker)
end
return reply
