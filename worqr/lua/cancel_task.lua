#!lua flags=allow-oom
-- cancel_task: cancels every task of a queue with this payload: waiting ones are removed, running ones are marked and their
-- workers told. One script sees all of the queue as long as no more than budget claims are held on it.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] counts HASH
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] task bytes
-- ARGV[4] cursor among the twins, 0 at first, - when they are done
-- ARGV[5] after place among the claims up to which they were looked at, - at first
-- ARGV[6] budget claims, and twins, to look at in one call
-- RETURNS ok waiting running cursor after claim... | more (the same; call again with cursor and after) | late
-- RESEND safe: the reply is stored under the producer's number
-- USES reference mark producer counts types
local producer, queue, counts = KEYS[1], KEYS[2], KEYS[3]
local number, lowest, task = ARGV[1], ARGV[2], ARGV[3]
local cursor, after, budget = ARGV[4], ARGV[5], tonumber(ARGV[6])

local before = replied(producer, number)
if before then
  return before
end
check_types(queue)
local holders = holders_of(queue)

local reply = {'ok', 0, 0, cursor, after}
local function mark_one(claim)
  mark(queue, claim)
  reply[#reply + 1] = claim
end

local raw, jobs = not job_id(task) and redis.call('LREM', queue, 0, task) or 0, 0
local twins = queue .. ':twins:' .. redis.sha1hex(task)
local cleared = tonumber(redis.call('HGET', counts, 'cleared')) or 0
if cursor ~= '-' then
  local page = redis.call('SSCAN', twins, cursor, 'COUNT', budget)
  cursor = page[1] == '0' and '-' or page[1]
  for _, id in ipairs(page[2]) do
    local job = queue .. ':job:' .. id
    local claim, queued = redis.call('HGET', queue .. ':active:' .. id, 'claim'), redis.call('HGET', job, 'queued')
    if claim then
      mark_one(claim)
    elseif not queued then
      redis.call('SREM', twins, id)
    elseif tonumber(queued) > cleared then -- else it lies in the trash
      redis.call('DEL', job)
      redis.call('SREM', twins, id)
      jobs = jobs + 1
    end
  end
end
if cursor == '-' and not job_id(task) then
  after = each_claim(queue, holders, after, budget, function(claim)
    if redis.call('LPOS', queue .. ':claim:' .. claim, task) then
      mark_one(claim)
    end
  end)
end
tally_stale(queue, jobs)
tally(queue, 'cancelled', raw + jobs)
local word = cursor == '-' and after == '-' and 'ok' or 'more'
reply[1], reply[2], reply[3], reply[4], reply[5] = word, raw + jobs, #reply - 5, cursor, after
return remember(producer, number, lowest, reply)
