#!lua
-- enqueue_traced: puts plain tasks at the back (or the front) of a queue, together with the context of a trace. Each becomes a job
-- with a generated id, and is found by its payload, as a plain task that was retried. All of them are stored or none. Wakes as
-- many waiting workers as there are tasks.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] bound tasks that may wait, including those due later; -1: no limit. A space and CHANNEL-NUMBER may follow: if the
--   queue is full, the producer waits for room under this name
-- ARGV[4] front 1: to be taken next, 0: to the back
-- ARGV[5] meta JSON, the `meta` of each of the jobs
-- ARGV[6..] tasks bytes, in the order in which they are to be taken
-- RETURNS ok stored | full waiting | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local queue = KEYS[2]
local bound, front, meta = ARGV[3], ARGV[4] == '1', ARGV[5]
local tasks_from, tasks = 6, #ARGV - 5

check_types(queue)
if not valid_option('meta', meta) then
  return redis.error_reply('ERR the meta of a task cannot be that')
end
local refused, waiter
if bound ~= '-1' then
  refused, waiter = refuse_enqueue(queue, bound, tasks)
end
if refused then
  return refused
end

local token = next_token(queue)
store_token(queue, token + tasks - 1)
for i = 0, tasks - 1 do
  local position = front and tasks - 1 - i or i
  local task = ARGV[tasks_from + position]
  local number, digest = digits(token + i), redis.sha1hex(task)
  local id = new_id(queue, number)
  redis.call('DEL', queue .. ':job:' .. id) -- another application's value, if there is one
  redis.call('HSET', queue .. ':job:' .. id, 'task', task, 'twin', digest, 'queued', number,
    'state', 'waiting', 'first', number, 'last', number, 'meta', meta)
  add_twin(queue, digest, id)
  redis.call(front and 'RPUSH' or 'LPUSH', queue, MARKER .. id)
end
renew_counts(queue)
count(queue, 'enqueued', tasks)
wake(queue, tasks)
if waiter then
  leave_waiters(queue, waiter)
end
return {'ok', tasks}
