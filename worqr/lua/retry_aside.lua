#!lua flags=allow-oom
-- retry_aside: makes jobs of what was set aside, to the back of the queue, all counters at zero. One whose id waits already
-- stays where it is; one whose id runs is blocked until that ends.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] list ZSET
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3..] retried claims under which they were set aside
-- RETURNS ok retried | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- USES aside counts fence policy types upsert wake
local queue, list = KEYS[2], KEYS[3]

check_types(queue)
local count, ready, ids = 0, 0, {}
local fence, now = next_fence(queue)
for i = 3, #ARGV do
  local retried = ARGV[i]
  local fields = redis.call('ZSCORE', list, retried) and read_hash(queue .. ':aside:' .. retried)
  local id = fields and fields.id
  local seen = id and look_for(queue, id)
  if seen and not seen.job then
    local dispatched = digits(fence + count)
    forget_aside(queue, retried)
    redis.call('ZREM', list, retried)
    local kept = {first = fields.first, meta = fields.meta, failed = fields.failed,
      scheduled_for = fields.scheduled_for}
    for _, name in ipairs(POLICY) do
      kept[name] = fields[name]
    end
    if not fields.first then -- it was a raw task
      kept.twin = redis.sha1hex(fields.task)
    end
    kept.twin = kept.twin or fields.twin
    if kept.twin then
      redis.call('SADD', queue .. ':twins:' .. kept.twin, id)
    end
    local _, put = create(queue, id, {id = id, fields = kept}, fields.task, dispatched, now, now, seen)
    count, ready, ids[#ids + 1] = count + 1, ready + put, id
  end
end
if count > 0 then
  note_fence(queue, fence + count - 1)
end
tally(queue, 'enqueued', count, ids)
wake(queue, ready)
return {'ok', count}
