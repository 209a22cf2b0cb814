-- The record of a batch, at its home queue: which parts it has, and what follows when all have closed.
-- The hash `:batch:ID` has the `token`, the `state` (open: its producer may add jobs; sealed; ended) and the follow-ups. Its field
-- `open` counts open parts. A follow-up of this queue is in the record. One of another queue is stored there, in the hash
-- `:part:TOKEN:follow_ups`, by the producer of the batch and with its rights: the record and the messages only name it.
-- The hash `:batch:ID:parts` has for each part, by the base of its queue, its version, 1 while it is
-- open, and its counters (part_counts). A version grows each time a part is opened again. Of two reports, the one with the higher
-- version is the newer.
-- The zset `:batches` has the batches by when the leader looks at them next.

local FIRST_CHECK = 10000 -- ms after which the leader looks at a batch, doubled each time
local LONGEST_CHECK = 300000
local FOLLOW_UP_EXPIRE = 86400000 -- ms for which another queue holds follow-ups after the batch was forgotten
local RENEWED_EVERY = 100 -- checks after which closed parts get a request too: else they might expire before the batch ends

-- Returns the key of the record of a batch.
local function batch_key(base, id)
  return base .. ':batch:' .. id
end

-- Like check_types, for the keys of a batch at its home.
local function check_batch_types(base, id)
  local batch = batch_key(base, id)
  redis.call('ZCARD', base .. ':batches')
  redis.call('HLEN', batch)
  redis.call('HLEN', batch .. ':parts')
end

-- Notifies the callers that wait for the batch.
local function notify_batch(base, id, state)
  redis.pcall('PUBLISH', base .. ':batch:' .. id, state)
end

-- Returns what the home knows of a part: its version (0: nothing), whether it is open, and its counters as text.
local function known_part(text)
  local v, open, counts = string.match(text or '', '^(%d+) (%d) (.*)$')
  return whole_number(v, 0), open == '1', counts or '0 0 0 0 0 0'
end

-- True if the text can be the counters of a part.
local function is_counts(text)
  local found = {string.match(text, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')}
  for _, each in ipairs(found) do
    if not is_digits(each) then
      return false
    end
  end
  return #found == 6
end

-- Returns the parts of a batch: for each its base, its version, whether it is open, and its counters.
local function parts_of(batch)
  local found, parts = {}, own(redis.pcall('HGETALL', batch .. ':parts')) or {}
  for i = 1, #parts, 2 do
    local v, open, counts = known_part(parts[i + 1])
    found[#found + 1] = {base = parts[i], v = v, open = open, counts = counts}
  end
  return found
end

-- Lets the leader look at a batch in `ms`.
local function check_batch_in(base, id, ms, now)
  redis.call('ZADD', base .. ':batches', digits(now + ms), id)
end

-- Returns 1 if the queue has messages for other queues, or batches that the leader is to look at; else 0.
local function needs_relay(base, now)
  local first_check = first_time(base .. ':batches')
  local is_due = first_check and first_check <= now
  return (is_due or redis.call('EXISTS', base .. ':outbox') == 1) and 1 or 0
end

-- Returns in how many ms the leader is to look at a batch next; -1 if there is none, or if it is due already.
local function next_check_in(base, now)
  local first_check = first_time(base .. ':batches')
  local check_in = first_check and first_check - now or -1
  return check_in > 0 and check_in or -1
end

-- Returns the sums of the counters of all parts: added, finished, failed, cancelled. Lost members have failed.
local function batch_totals(batch)
  local sums = {0, 0, 0, 0, 0, 0}
  for _, part in ipairs(parts_of(batch)) do
    local i = 1
    for n in string.gmatch(part.counts, '%d+') do
      sums[i], i = (sums[i] or 0) + whole_number(n, 0), i + 1
    end
  end
  return sums[1], sums[2], sums[3] + sums[5], sums[4]
end

-- Returns the id of the follow-up in the queue `to` for the ending number `endings`.
local function follow_up_id(to, token, kind, endings)
  return '@' .. token .. '.' .. kind .. (endings > 1 and '.' .. digits(endings) or '') .. shard_suffix(to)
end

-- Returns the options of a follow-up, unpacked, or nil if they cannot be that. They are checked like those of a dispatch: the script that
-- enqueues the follow-up may end other jobs too, and must not fail on it.
local function follow_up_options(options)
  local known, o = pcall(cmsgpack.unpack, options)
  return known and type(o) == 'table' and not o.batch and not invalid_job(o, '') and o or nil
end

-- Enqueues a follow-up in this queue: its options `o` and its task. `facts`: what its run learns of the batch. `parent`: the batch that it
-- becomes a member of, or false. Returns how many tasks became claimable.
local function enqueue_follow_up(base, id, o, task, facts, parent)
  local number, now = next_token(base)
  o.id, o.fields = id, o.fields or {}
  o.fields.batch_ended = cmsgpack.pack(facts)
  if parent then
    o.fields.batch = parent
    note_member(parent, 'added', id)
  end
  store_token(base, number)
  local _, ready = create_job(base, id, o, task, digits(number), o.run_at or now + (o.delay or 0), now, {})
  count(base, 'enqueued', 1, {id})
  return ready
end

-- Sends the `follow_up` of the ending `facts.endings`: the base of its queue; and its options and its task, if that is this queue. One of
-- another queue is held there: a message tells that queue to enqueue it. Returns how many tasks became claimable, and the follow-up:
-- the base of its queue and its id; no id if its record was damaged.
local function send_follow_up(base, kind, follow_up, facts, parent)
  local to, token = follow_up[1], facts.token
  local id = follow_up_id(to, token, kind, facts.endings)
  local name = to .. '\n' .. id
  if to == base then
    local o, task = follow_up_options(follow_up[2]), follow_up[3]
    if not (o and task) then
      return 0, nil
    end
    return enqueue_follow_up(base, id, o, task, facts, parent), name
  elseif follow_up[3] then -- stored here by an earlier form of open_batch: no relay delivers it, see the wire reference
    post(base, 'follow_up ' .. token .. ' ' .. digits(facts.endings),
      {'follow_up', to, token, digits(facts.endings), follow_up[2], follow_up[3]})
    return 0, name
  end
  post(base, 'release ' .. token .. ' ' .. digits(facts.endings), {'release', to, token, kind, digits(facts.endings),
    cmsgpack.pack({added = facts.added, finished = facts.finished, failed = facts.failed, cancelled = facts.cancelled,
      ended_at = facts.ended_at, cancel_reason = facts.cancel_reason})})
  return 0, name
end

-- Tells the other queues that hold follow-ups of a batch for how many ms to keep them; 0: until the next such message.
local function post_keep(base, token, queues, ms)
  for i, to in ipairs(queues) do
    if to and to ~= base and to ~= queues[i - 1] then
      post(base, 'keep ' .. token .. ' ' .. to, {'keep', to, token, digits(ms)})
    end
  end
end

-- True if a message that enqueues a follow-up of a batch in another queue was not delivered yet. Of the last 100 endings.
local function has_release(base, batch)
  local kept = redis.call('HMGET', batch, 'token', 'endings')
  local last = is_digits(kept[2]) and tonumber(kept[2]) or 0
  for ending = math.max(1, last - 99), last do
    local topic = 'release ' .. (kept[1] or '') .. ' ' .. digits(ending)
    if own(redis.pcall('HEXISTS', base .. ':outbox', topic)) == 1 then
      return true
    end
  end
  return false
end

-- Deletes the record of a batch. Other queues may then forget its follow-ups, a day later: a message that enqueues one may be on its way.
local function forget_batch(base, id)
  local batch = batch_key(base, id)
  local kept = own(redis.pcall('HMGET', batch, 'token', 'then', 'otherwise')) or {}
  if kept[1] then
    post_keep(base, kept[1], {kept[2], kept[3]}, FOLLOW_UP_EXPIRE)
  end
  redis.call('DEL', batch, batch .. ':parts')
  redis.call('ZREM', base .. ':batches', id)
end

-- Ends the batch if it is sealed and no part of it is open: its follow-up is put in line, `then` if all members have finished,
-- else `otherwise`. Returns how many tasks became claimable.
local function end_if_complete(base, id, now)
  local batch = batch_key(base, id)
  local kept = redis.call('HMGET', batch, 'state', 'open', 'token', 'keep', 'meta', 'cancel_reason', 'parent')
  if kept[1] ~= 'sealed' or not kept[3] or whole_number(kept[2], 0) > 0 then
    return 0
  end
  local added, finished, failed, cancelled = batch_totals(batch)
  local endings = add_to(batch, 'endings', 1)
  redis.call('HSET', batch, 'state', 'ended', 'ended_at', digits(now))
  redis.call('HDEL', batch, 'checks', 'follow_up')
  check_batch_in(base, id, whole_number(kept[4], 0), now)
  local kind, ready = (finished < added or kept[6]) and 'otherwise' or 'then', 0
  local follow_up = redis.call('HMGET', batch, kind, kind .. '_options', kind .. '_task')
  if follow_up[1] then
    local facts = {home = base, id = id, token = kept[3], added = added, finished = finished, failed = failed,
      cancelled = cancelled, endings = endings, ended_at = digits(now), meta = kept[5] or nil,
      cancel_reason = kept[6] or nil}
    local sent, name = send_follow_up(base, kind, follow_up, facts, kept[7])
    if name then
      redis.call('HSET', batch, 'follow_up', name)
    end
    ready = sent
  end
  if kept[7] then
    note_member(kept[7], kind == 'then' and 'finished' or 'failed', NESTED .. id)
  end
  notify_batch(base, id, 'ended')
  return ready
end

-- Opens an ended batch again, because a failed member was put back. If it is a member of another batch, it is one again.
local function reopen_batch(base, id, now)
  local batch = batch_key(base, id)
  local parent = redis.call('HGET', batch, 'parent')
  redis.call('HSET', batch, 'state', 'sealed')
  redis.call('HDEL', batch, 'ended_at', 'cancel_reason', 'follow_up')
  check_batch_in(base, id, FIRST_CHECK, now)
  notify_batch(base, id, 'sealed')
  if parent and batch_to_rejoin(base, parent) then
    note_member(parent, 'back', NESTED .. id)
  end
end

-- Tells a part that its batch was cancelled, by the outbox.
local function post_cancel(base, id, part)
  local kept = redis.call('HMGET', batch_key(base, id), 'token', 'keep', 'cancel_reason')
  local message = {'cancel', part.base, kept[1], digits(part.v), base, id, kept[2] or '0', kept[3] or ''}
  post(base, 'cancel ' .. kept[1] .. ' ' .. part.base, message)
end

-- Returns how many members have failed, by the counters of a part.
local function failures_in(counts)
  return whole_number(string.match(counts, '%d+$'), 0)
end

-- Cancels a batch that has not ended: it takes no members any more, and each open part gets a message. The members end as
-- cancelled, and then the batch ends. Returns how many tasks became claimable.
local function abandon_batch(base, id, reason, now)
  local batch = batch_key(base, id)
  redis.call('HSET', batch, 'state', 'sealed', 'cancel_reason', reason, 'sealed_at', digits(now))
  redis.call('HDEL', batch, 'checks')
  check_batch_in(base, id, FIRST_CHECK, now)
  for _, part in ipairs(parts_of(batch)) do
    if part.open then
      post_cancel(base, id, part)
    end
  end
  notify_batch(base, id, 'cancelled')
  return end_if_complete(base, id, now)
end

-- Takes the `report` of a part: its base, its version, whether it is closed, and its counters as text. A report that is not newer
-- than what the home knows changes nothing. Returns how many tasks became claimable.
local function take_report(base, id, token, report)
  local batch = batch_key(base, id)
  local parts = batch .. ':parts'
  local kept = own(redis.pcall('HMGET', batch, 'token', 'state', 'on_failed', 'cancel_reason')) or {}
  local v, open, counts = known_part(own(redis.pcall('HGET', parts, report.part)) or nil)
  if kept[1] ~= token or report.v < v or report.v == v and not open then
    return 0
  end
  local now = now_ms()
  redis.call('HSET', parts, report.part, digits(report.v) .. ' ' .. (report.closed and 0 or 1) .. ' ' .. report.counts)
  if open == report.closed then
    add_to(batch, 'open', report.closed and -1 or 1)
  end
  local is_cancelled = kept[4]
  if kept[2] == 'ended' then -- a member was put back, and may have ended again
    reopen_batch(base, id, now)
    is_cancelled = false
  elseif is_cancelled and report.v > v and not report.closed then
    post_cancel(base, id, {base = report.part, v = report.v})
  end
  if kept[3] and not is_cancelled and failures_in(report.counts) > failures_in(counts) then
    return abandon_batch(base, id, 'a job of the batch failed', now)
  end
  return end_if_complete(base, id, now)
end

-- Returns the entry of check_batches for a sealed batch, and lets the leader look at it later.
local function check_entry(base, id, now)
  local batch = batch_key(base, id)
  local checks = math.max(1, add_to(batch, 'checks', 1))
  check_batch_in(base, id, math.min(FIRST_CHECK * 2 ^ (checks - 1), LONGEST_CHECK), now)
  local kept = redis.call('HMGET', batch, 'token', 'cancel_reason', 'keep')
  local entry = {id, kept[1], kept[2], is_digits(kept[3]) and kept[3] or '0'}
  for _, part in ipairs(parts_of(batch)) do
    if part.v > 0 and is_line(part.base) and (part.open or checks % RENEWED_EVERY == 0) then
      entry[#entry + 1], entry[#entry + 2] = part.base, digits(part.v)
    end
  end
  return entry
end

local RUNNING_AT_ONCE = 1000 -- claims that are compared with the members of a cancelled part before the others are cancelled

-- Requests the cancellation of members of a part that run, before those that wait: they may take long to end.
local function cancel_running_members(base, holders, members, reason)
  local marked = {}
  each_claim(base, holders, '-', RUNNING_AT_ONCE, function(claim)
    local id = job_id(own(redis.pcall('LINDEX', base .. ':claim:' .. claim, 0)) or '')
    if id and redis.call('SISMEMBER', members, id) == 1 then
      local n = #marked
      marked[n + 1], marked[n + 2] = store_cancel_reason(base, id, reason)
    end
  end)
  request_cancels(base, marked)
end

-- Cancels members of a part: jobs, and batches that are members. Returns how many tasks became claimable.
local function cancel_members(base, members, reason)
  local ids, marked, ready, ttl, now = {}, {}, 0, longest_result_ttl(base), now_ms()
  for _, id in ipairs(members) do
    local nested = string.sub(id, 1, 1) == NESTED and string.sub(id, 2)
    local kept = nested and own(redis.pcall('HMGET', (batch_key(base, nested)), 'state', 'cancel_reason', 'token')) or {}
    if kept[1] and kept[3] and kept[1] ~= 'ended' and not kept[2] then
      ready = ready + abandon_batch(base, nested, reason, now)
    elseif not nested and cancel_queued(base, id, ttl, reason) == 1 then
      ids[#ids + 1] = id
    elseif not nested then
      local claim, worker = store_cancel_reason(base, id, reason)
      marked[#marked + 1], marked[#marked + 2] = claim, worker
    end
  end
  request_cancels(base, marked)
  count(base, 'cancelled', #ids, ids)
  return ready
end

-- What is shown of a batch.
local BATCH_FACTS = {'token', 'state', 'cancel_reason', 'made_at', 'sealed_at', 'ended_at', 'open_until', 'keep',
  'on_failed', 'meta', 'endings', 'follow_up', 'parent'}

-- Returns what is stored about a batch: its id, names and values, and four values for each part: the base of its queue, its version,
-- 1 if it is open, and its counters. Those of an open part of this queue are of this moment.
local function batch_entry(base, id)
  local batch = batch_key(base, id)
  local kept, facts, parts = own(redis.pcall('HMGET', batch, unpack(BATCH_FACTS))) or {}, {}, {}
  for i, name in ipairs(BATCH_FACTS) do
    if kept[i] then
      facts[#facts + 1], facts[#facts + 2] = name, kept[i]
    end
  end
  for _, part in ipairs(parts_of(batch)) do
    local counts = part.counts
    if part.open and part.base == base and kept[1] then
      counts = part_counts(base, kept[1])
    end
    local n = #parts
    parts[n + 1], parts[n + 2], parts[n + 3], parts[n + 4] = part.base, digits(part.v), part.open and 1 or 0, counts
  end
  return {id, facts, parts}
end
