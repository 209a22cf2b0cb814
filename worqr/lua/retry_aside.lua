#!lua flags=allow-oom
-- retry_aside: turns dead-letter records into jobs, at the back of the queue, with all counters at zero. A job whose id waits
-- already keeps its position; a job whose id runs is blocked until that run ends. A task that was a member of a batch is one again.
-- It stays where it is while its id runs, or while its batch is being cancelled.
-- KEYS[1] producer HASH
-- KEYS[2] queue LIST
-- KEYS[3] list ZSET
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3..] retried claims under which they failed
-- RETURNS ok retried | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
local queue, list = KEYS[2], KEYS[3]

-- False if a key of another type is where the job's record, its active record or its reserved id would be.
local function is_free(id)
  return own(redis.pcall('HLEN', queue .. ':job:' .. id)) and own(redis.pcall('HLEN', queue .. ':active:' .. id))
    and own(redis.pcall('GET', queue .. ':taken:' .. id)) ~= nil
end

check_types(queue)
local stored, ready, ids, taken_over = 0, 0, {}, nil
local token, now = next_token(queue)
for i = 3, #ARGV do
  local retried = ARGV[i]
  local fields = redis.call('ZSCORE', list, retried) and read_hash(queue .. ':aside:' .. retried)
  local id = fields and fields.task and fields.id
  local free = id and is_free(id)
  taken_over = taken_over or id and not free and id
  local seen = free and find_job(queue, id)
  local batch, stays
  if seen and not seen.job and fields.batch then
    batch, stays = batch_to_rejoin(queue, fields.batch)
    stays = stays or batch and seen.active
  end
  if seen and not seen.job and not stays then
    local dispatched = digits(token + stored)
    delete_dead_letter(queue, retried)
    redis.call('ZREM', list, retried)
    local kept = {first = fields.first, meta = fields.meta, failed = fields.failed,
      scheduled_for = fields.scheduled_for, batch = batch}
    local o = {id = id, fields = kept, lane = is_lane(fields.lane) and fields.lane or nil}
    for _, name in ipairs(POLICY) do
      kept[name] = fields[name]
    end
    if fields.saved_size then
      copy_saved(fields, kept)
    end
    if not fields.first then -- it was a raw task
      kept.twin = redis.sha1hex(fields.task)
    end
    kept.twin = kept.twin or fields.twin
    if kept.twin then
      add_twin(queue, kept.twin, id)
    end
    if batch then
      note_member(batch, 'back', id)
    end
    local _, put = create_job(queue, id, o, fields.task, dispatched, now, now, seen)
    stored, ready, ids[#ids + 1] = stored + 1, ready + put, id
  end
end
if stored == 0 and taken_over then
  find_job(queue, taken_over) -- an error, before anything is written
elseif stored > 0 then
  store_token(queue, token + stored - 1)
end
count(queue, 'enqueued', stored, ids)
wake(queue, ready + count_members(queue))
return {'ok', stored}
