#!lua flags=no-writes
-- list_tasks: returns waiting payloads, newest first, or from the front in the order in which they will be taken. Those of lanes
-- follow, lane by lane: first the lanes whose turn comes first, at the end those that may not start any.
-- KEYS[1] queue LIST
-- KEYS[2] suspects LIST
-- KEYS[3] lanes HASH
-- ARGV[1] limit tasks
-- ARGV[2] from_front 1: the next to be taken first, 0: the newest first
-- ARGV[3] max_bytes bytes of payload after which no further task is listed
-- ARGV[4] max_skipped references without a record that are skipped at most
-- RETURNS ok waiting task...
-- RESEND safe: it only reads
local queue, suspects, lanes = KEYS[1], KEYS[2], KEYS[3]
local limit, from_front = tonumber(ARGV[1]), ARGV[2] == '1'
local max_bytes, max_skipped = tonumber(ARGV[3]), tonumber(ARGV[4])

local reply = {'ok', waiting_length(queue)}
local bytes, skipped, listed = 0, 0, {}

-- Lists one item; returns false if the reply is full.
local function list(item)
  if #reply - 2 >= limit or bytes >= max_bytes or skipped >= max_skipped then
    return false
  end
  local id = job_id(item)
  local task = item
  if id then
    local kept = own(redis.pcall('HMGET', queue .. ':job:' .. id, 'task', 'state')) or {}
    task = kept[2] == 'waiting' and not listed[id] and kept[1] -- a job that was due in between has two positions in the lists
  end
  if task then
    reply[#reply + 1] = task
    bytes, listed[id or ''] = bytes + #task, id
  else
    skipped = skipped + 1
  end
  return true
end

if limit > 0 then
  local epoch = own(redis.pcall('HGET', lanes, 'epoch')) or false
  local function list_all(key)
    tolerant(function() read_items(key, 0, from_front, max_bytes, list) end)
  end
  list_all(from_front and suspects or queue)
  list_all(from_front and queue or suspects)
  for _, key in ipairs({queue .. ':lanes:ring', queue .. ':lanes:held'}) do
    for _, lane in ipairs(own(redis.pcall('ZRANGE', key, 0, limit - 1)) or {}) do
      list_all(lane_list(queue, lane, epoch))
    end
  end
end
return reply
