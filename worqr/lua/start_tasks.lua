#!lua flags=allow-oom
-- start_tasks: moves up to n tasks into claims of a worker that stands in the fence; a suspect first, one at a time.
-- Short of n because nothing is left: the worker joins the hungry in the same script. Left some behind: wakes one more.
-- KEYS[1] queue LIST
-- KEYS[2] workers HASH
-- KEYS[3] claims SET
-- KEYS[4] hungry SET
-- KEYS[5] suspects LIST
-- KEYS[6] paused STRING
-- ARGV[1] worker id
-- ARGV[2] number of the worker's start request on this queue, counts from 1
-- ARGV[3] wanted tasks, 0: only pass a wake-up on
-- ARGV[4] max_bytes bytes of payload after which no further task is taken
-- ARGV[5] max_skipped references to nothing that are skipped at most
-- RETURNS ok first entry... | short first entry... (joined the hungry) | paused | late | not_serving;
--   claims are first, first + 1, ...; an entry is the payload, or for a job: payload id failures stalls timeouts
-- RESEND safe: fenced by the number; an equal one gets the same claims again, a lower one nothing
-- USES reference counts fence wake
local queue, workers, claims, hungry, suspects, paused = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local worker, number, wanted = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_bytes, max_skipped = tonumber(ARGV[4]), tonumber(ARGV[5])

local function entry(item)
  local id = job_id(item)
  if not id then
    return item
  end
  local kept = redis.call('HMGET', queue .. ':active:' .. id, 'task', 'failures', 'stalls', 'timeouts')
  return {kept[1] or '', id, tonumber(kept[2]) or 0, tonumber(kept[3]) or 0, tonumber(kept[4]) or 0}
end

local fence = redis.call('HGET', workers, worker)
if not fence then
  return {'not_serving'}
end
local last, first, count, suspect = string.match(fence, '^(%d+) (%d+) (%d+) (%d+)$')
if number < tonumber(last) then
  return {'late'}
end
if number == tonumber(last) then
  local again = {'ok', first}
  for i = 0, tonumber(count) - 1 do
    local item = redis.call('LINDEX', queue .. ':claim:' .. digits(first + i), 0)
    again[#again + 1] = item and entry(item)
  end
  return again
end
if redis.call('EXISTS', paused) == 1 then
  redis.call('HSET', workers, worker, digits(number) .. ' 0 0 ' .. suspect)
  return {'paused'}
end

local source, dry = suspects, false
if suspect ~= '0' and redis.call('SISMEMBER', claims, suspect) == 1 then
  source = queue
end
local taken, skipped, bytes, next_claim = 0, 0, 0, next_fence(queue)
local reply = {'ok', digits(next_claim)}
while taken < wanted and skipped < max_skipped and bytes < max_bytes and not dry do
  local item = redis.call('LINDEX', source, -1)
  local id = item and job_id(item)
  local job, active = id and queue .. ':job:' .. id, id and queue .. ':active:' .. id
  if not item then
    dry, source = source == queue, queue
  elseif id and (redis.call('HEXISTS', job, 'task') == 0 or redis.call('EXISTS', active) == 1) then
    redis.call('RPOP', source)
    skipped = skipped + 1
  else
    local claim = digits(next_claim + taken)
    redis.call('RPOPLPUSH', source, queue .. ':claim:' .. claim)
    redis.call('SADD', claims, claim)
    if id then
      redis.call('RENAME', job, active)
      redis.call('HSET', active, 'claim', claim, 'worker', worker)
    end
    if source == suspects then
      suspect, source = claim, queue
    end
    local taken_entry = entry(item)
    taken, bytes = taken + 1, bytes + #(id and taken_entry[1] or item)
    reply[#reply + 1] = taken_entry
  end
end

redis.call('HSET', workers, worker, table.concat({digits(number), digits(next_claim), digits(taken), suspect}, ' '))
if taken > 0 then
  note_fence(queue, next_claim + taken - 1)
end
tally(queue, 'claimed', taken)
tally_stale(queue, -skipped)
if dry then
  redis.call('SADD', hungry, worker)
  reply[1] = 'short'
else
  if wanted > 0 then
    redis.call('SREM', hungry, worker)
  end
  wake_for_rest(queue)
end
return reply
