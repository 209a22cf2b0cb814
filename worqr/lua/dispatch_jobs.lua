#!lua
-- dispatch_jobs: stores jobs, or changes those that have the same id, each by its options. A job whose id runs is blocked until
-- that run ends. Wakes as many waiting workers as there are new tasks.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] whole 1: if one is a duplicate or the queue is full, none is stored
-- ARGV[4..] jobs options (a msgpack map, see _dispatch.lua) and task bytes, in turn
-- RETURNS ok entry... | refused entry... (whole: up to the one that was refused) | late; an entry is outcome (created, updated,
--   blocked, unchanged, duplicate, full, closed), id, number of the dispatch that its handle waits for
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local queue = KEYS[2]
local whole = ARGV[3] == '1'

-- Everything that can be wrong is checked before the first write: types, options, and, of a whole, what is refused.
check_types(queue)
local jobs, looked, more, reply = {}, {}, 0, {'ok'}
for i = 4, #ARGV, 2 do
  local job, task = ARGV[i], ARGV[i + 1]
  local o = cmsgpack.unpack(job)
  local wrong = invalid_job(o, task)
  if wrong then
    return wrong
  end
  local seen = o.id and find_job(queue, o.id)
  if whole then
    local status = refusal(queue, o, seen or {}, more)
    if o.id and looked[o.id] then
      status = (o.exists == 'raise' or o.batch) and 'duplicate' or nil
    elseif not status and not (seen and seen.job) then
      more = more + 1
    end
    reply[#reply + 1] = {status or 'created', o.id or '', seen and seen.last or '0'}
    if status and status ~= 'unchanged' then
      reply[1] = 'refused'
      return reply
    end
  end
  if o.id then
    looked[o.id] = true
  end
  jobs[#jobs + 1] = {o, task, seen}
end

local created, ready, subscribers, ids, waiter = 0, 0, nil, nil, nil
local token, now = next_token(queue)
store_token(queue, token + #jobs - 1)
reply = {'ok'}
local done = {}
for i, job in ipairs(jobs) do
  local o, task, seen = job[1], job[2], job[3]
  if o.id and done[o.id] then
    seen = find_job(queue, o.id)
  end
  local outcome, id, last, put, made = upsert(queue, o, task, digits(token + i - 1), now, seen)
  done[id], created, ready = true, created + made, ready + put
  waiter = outcome ~= 'full' and o.waiter or waiter
  if made == 1 then
    subscribers = subscribers or redis.pcall('PUBSUB', 'NUMSUB', queue .. ':events')
    ids = ids or subscribers[2] and subscribers[2] > 0 and {}
    if ids then
      ids[#ids + 1] = id
    end
  end
  reply[#reply + 1] = {outcome, id, last}
end
renew_counts(queue)
count(queue, 'enqueued', created, ids, subscribers)
wake(queue, ready + count_members(queue))
if waiter then
  leave_waiters(queue, waiter)
end
return reply
