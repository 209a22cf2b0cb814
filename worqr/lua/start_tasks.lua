#!lua flags=allow-oom
-- start_tasks: moves up to n tasks into claims of an admitted worker: a suspect first, one at a time, then lanes by turns. If
-- there are fewer tasks, due jobs are put into the queue. An expired job goes to the dead-letter queue, and its number is used
-- up. If no task is left, or no more may start, the worker joins the waiting workers in the same script. If tasks are left
-- that may start, one more worker is woken. Producers that wait for room are woken, too.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] claims SET
-- KEYS[4] hungry SET
-- KEYS[5] suspects LIST
-- KEYS[6] paused STRING
-- KEYS[7] due ZSET
-- KEYS[8] limits HASH
-- KEYS[9] lanes HASH
-- KEYS[10] waiters HASH
-- ARGV[1] worker id
-- ARGV[2] number of the worker's start request on this queue, counts from 1
-- ARGV[3] wanted tasks, 0: only pass a wake-up on
-- ARGV[4] max_bytes bytes of payload after which no further task is taken
-- ARGV[5] max_skipped references without a record that are skipped at most
-- RETURNS ok first entry... | short first hungry entry... | limited first hungry entry... | paused | late | not_serving;
--   short: no task is left. limited: a limit, or a pause that ends by itself, allows no more. In both cases the worker joined
--   the waiting workers; hungry is their number. paused: the queue is paused until it is resumed;
--   claims are first, first + 1, ...; an entry is the payload, or for a job the names and values of its record and its id;
--   false for a claim that is gone
-- RESEND safe: fenced by the number; an equal one gets the same claims again, a lower one nothing
local queue, workers, claims, hungry = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local suspects, paused, due, limits, lanes, waiters = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local worker, number, wanted = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_bytes, max_skipped = tonumber(ARGV[4]), tonumber(ARGV[5])

local earlier_reply, suspect = repeated_start(queue, admission_of(workers, worker), number)
if earlier_reply then
  return earlier_reply
end
-- A key of a wrong type is an error before the first write. Keys that only an expired job needs are checked when there is one.
local left, workers_wait = redis.call('LLEN', queue) + redis.call('LLEN', suspects), redis.call('SCARD', hungry) > 0
local first_source = redis.call('SISMEMBER', claims, suspect) == 0 and suspects or queue
local source, exhausted, due_count, promoted = first_source, false, redis.call('ZCARD', due), 0
local next_claim, now = next_token(queue)
local has_limits, has_lanes, has_waiters = what_exists(paused, limits, lanes, waiters)
local room = not has_limits and wanted or room_to_start(queue, wanted, now)
if not room then
  redis.call('HSET', workers, worker, digits(number) .. ' 0 0 ' .. suspect)
  return {'paused'}
end
if has_lanes then
  check_lane_types(queue)
  open_lanes(queue, max_skipped, now)
end
local reply, mine = {'ok', digits(next_claim)}, {}
local start = {base = queue, worker = worker, next_claim = next_claim, now = now, wanted = wanted, room = room,
  max_skipped = max_skipped, max_bytes = max_bytes, taken = 0, skipped = 0, bytes = 0, reply = reply, mine = mine}
while may_take(start) and not exhausted do
  local status = next_tasks(start, source, has_lanes)
  if status == 'empty' and source == queue and due_count > 0 then
    promoted = promote(queue, max_skipped, now)
    left, due_count, source = left + promoted, 0, first_source
    has_lanes = redis.call('EXISTS', lanes) == 1
  elseif status == 'empty' then
    exhausted, source = source == queue, queue
  elseif status == 'suspect' then
    source = first_source
  elseif status == 'taken' and source == suspects then
    suspect, first_source, source = mine[#mine], queue, queue
  end
end
local taken, skipped = start.taken, start.skipped
note_claims(start, claims, has_limits)

redis.call('HSET', workers, worker, table.concat({digits(number), digits(next_claim), digits(taken), suspect}, ' '))
count(queue, 'claimed', taken, nil, nil, reply)
left = has_lanes and startable_items(queue) or left - taken - skipped
remove_stale(queue, skipped, left + (has_lanes and redis.call('EXISTS', queue .. ':lanes:names') or 0))
if has_waiters then
  wake_producers(queue)
end
-- Tasks are left although the lists were read to the end: these are suspects, and this worker runs one. Others may take them.
local wakes = math.min(left, exhausted and math.max(promoted, 1) or 1)
if workers_wait and (wakes > 0 or not exhausted) then
  redis.call('SREM', hungry, worker)
  wake(queue, wakes)
end
if exhausted or (taken < wanted and #mine >= room) then
  redis.call('SADD', hungry, worker)
  reply[1] = exhausted and 'short' or 'limited'
  table.insert(reply, 3, redis.call('SCARD', hungry))
end
wake(queue, count_members(queue)) -- of jobs that have expired
return reply
