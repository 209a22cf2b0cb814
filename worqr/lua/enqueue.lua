#!lua
-- enqueue: puts tasks at the back (or the front) of a queue and wakes as many waiting workers as there are tasks.
-- All of them are stored or none. A payload that begins with the reference marker becomes a job with a generated id.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] bound tasks that may wait, including those due later; -1: no limit. A space and CHANNEL-NUMBER may follow: if the
--   queue is full, the producer waits for room under this name
-- ARGV[4] front 1: to be taken next, 0: to the back
-- ARGV[5..] tasks bytes, in the order in which they are to be taken
-- RETURNS ok stored | full waiting | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local queue = KEYS[2]
local bound, front = ARGV[3], ARGV[4] == '1'
local tasks_from, tasks = 5, #ARGV - 4

-- A key of a wrong type is an error before the first write.
redis.call('LLEN', queue)
local workers_wait = redis.call('SCARD', queue .. ':hungry') > 0
local refused, waiter
if bound ~= '-1' then
  refused, waiter = refuse_enqueue(queue, bound, tasks)
end
if refused then
  return refused
end

local function stored_item(task)
  if not job_id(task) then
    return task
  end
  local token = next_token(queue)
  store_token(queue, token)
  local id, digest = new_id(queue, digits(token)), redis.sha1hex(task)
  redis.call('DEL', queue .. ':job:' .. id) -- another application's value, if there is one
  redis.call('HSET', queue .. ':job:' .. id, 'task', task, 'twin', digest, 'queued', digits(token),
    'state', 'waiting', 'first', digits(token), 'last', digits(token))
  own(redis.pcall('SADD', queue .. ':twins:' .. digest, id)) -- the same: then the job cannot be found by its payload
  return MARKER .. id
end

count(queue, 'enqueued', tasks) -- the first write: an error if the counters are of another type
for chunk = 0, tasks - 1, 1000 do
  local items = {}
  for i = chunk, math.min(chunk + 1000, tasks) - 1 do
    local position = front and tasks - 1 - i or i
    items[#items + 1] = stored_item(ARGV[tasks_from + position])
  end
  redis.call(front and 'RPUSH' or 'LPUSH', queue, unpack(items))
end
if workers_wait then
  wake(queue, tasks)
end
if waiter then
  leave_waiters(queue, waiter)
end
return {'ok', tasks}
