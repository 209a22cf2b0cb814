#!lua flags=allow-oom
-- cancel_task: cancels every task of a queue with this payload: waiting ones are removed, running ones are marked and their
-- workers told. One script sees all of the queue as long as no more than budget claims are held on it.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] task bytes
-- ARGV[4] cursor among the twins, 0 at first, - when they are done
-- ARGV[5] after worker id up to which claims were looked at, - at first
-- ARGV[6] budget claims, and twins, to look at in one call
-- RETURNS ok waiting running cursor after claim... | more (the same; call again with cursor and after) | late
-- RESEND safe: the reply is stored under the producer's number
-- USES reference mark producer
local producer, queue = KEYS[1], KEYS[2]
local number, lowest, task = ARGV[1], ARGV[2], ARGV[3]
local cursor, after, budget = ARGV[4], ARGV[5], tonumber(ARGV[6])

local before = replied(producer, number)
if before then
  return before
end

local marked = {}
local function mark_one(claim)
  mark(queue, claim)
  marked[#marked + 1] = claim
end

local waiting = 0
if not job_id(task) then
  waiting = redis.call('LREM', queue, 0, task)
end
local twins = queue .. ':twins:' .. redis.sha1hex(task)
if cursor ~= '-' then
  local page = redis.call('SSCAN', twins, cursor, 'COUNT', budget)
  cursor = page[1] == '0' and '-' or page[1]
  for _, id in ipairs(page[2]) do
    local claim = redis.call('HGET', queue .. ':active:' .. id, 'claim')
    if claim then
      mark_one(claim)
    elseif redis.call('DEL', queue .. ':job:' .. id) == 1 then
      redis.call('SREM', twins, id)
      tally_stale(queue, 1)
      waiting = waiting + 1
    end
  end
end
if cursor == '-' then
  after = each_claim(queue, after, budget, function(claim)
    if redis.call('LPOS', queue .. ':claim:' .. claim, task) then
      mark_one(claim)
    end
  end)
end
tally(queue, 'cancelled', waiting)
local done = cursor == '-' and after == '-'
return remember(producer, number, lowest, {done and 'ok' or 'more', waiting, #marked, cursor, after, unpack(marked)})
