#!lua flags=no-writes
-- list_workers: one page of the workers, by id, for people: the registered ones, and dead ones whose tasks are being given back.
-- KEYS[1] registered SET
-- KEYS[2] dying SET
-- KEYS[3] leader STRING
-- ARGV[1] after text, the last worker id of the page before, '' for the first page
-- ARGV[2] limit workers in one page
-- ARGV[3] queue_limit names of queues after which a page ends
-- ARGV[4] worker_stem text before the worker id in its keepalive key
-- ARGV[5] info_stem text before the worker id in the key of its facts
-- ARGV[6] work_map_stem text before the worker id in the key of its work map
-- ARGV[7] last worker id after which none is listed, '' for none
-- RETURNS ok lease cursors entry...: lease is that of the leader ('' for none); cursors are the ids after which the further pages
--   begin, so that they can be read side by side; an entry is worker dead ttl_ms facts queues, with dead 1 or 0
-- RESEND safe: it only reads
local registered, dying, leader = KEYS[1], KEYS[2], KEYS[3]
local after, limit, queue_limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local worker_stem, info_stem, work_map_stem, last = ARGV[4], ARGV[5], ARGV[6], ARGV[7]

limit = math.max(1, limit)
local workers, dead = {}, {}
for _, worker in ipairs(redis.call('SMEMBERS', registered)) do
  if worker > after and (last == '' or worker <= last) then
    workers[#workers + 1] = worker
  end
end
for _, worker in ipairs(redis.call('SMEMBERS', dying)) do
  if worker > after and (last == '' or worker <= last) then
    workers[#workers + 1] = worker
    dead[worker] = 1
  end
end
table.sort(workers)
local cursors, listed = {}, 0
local reply = {'ok', redis.call('GET', leader) or '', cursors}
for n, worker in ipairs(workers) do
  if n > limit or listed >= queue_limit then
    for start = n - 1, #workers - 1, limit do
      cursors[#cursors + 1] = workers[start]
    end
    break
  end
  local queues = redis.call('SMEMBERS', work_map_stem .. worker)
  listed = listed + #queues
  reply[#reply + 1] = {worker, dead[worker] or 0, redis.call('PTTL', worker_stem .. worker),
    redis.call('HGETALL', info_stem .. worker), queues}
end
return reply
