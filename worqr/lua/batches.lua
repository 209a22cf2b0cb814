-- Batches: the record of a batch at its home queue, its parts in other queues, and the messages between them.

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
local FOLLOW_UP_EXPIRE = 86400000 -- ms for which a queue holds follow-ups after the batch, or the dead letter of the job, was forgotten
local HELD_AFTER_END = 3600000 -- ms for which a queue knows that it has enqueued the last follow-up of a job: messages may come twice
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

-- Enqueues a follow-up in this queue: its options `o` and its task. `facts`: what its run learns of the batch, or of the job (it has a
-- value). `parent`: the batch that it becomes a member of, or false. Returns how many tasks became claimable.
local function enqueue_follow_up(base, id, o, task, facts, parent)
  local number, now = next_token(base)
  local value = facts.value -- any bytes, which MessagePack of this form does not tell from a text
  facts.value = nil
  local packed = cmsgpack.pack(facts)
  o.id, o.fields = id, o.fields or {}
  o.fields[value and 'job_ended' or 'batch_ended'] = value and digits(#packed) .. ' ' .. packed .. value or packed
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

-- Sets for how many ms this queue holds follow-ups; 0: until the next call. Once it has a limit, it keeps it.
local function keep_held(base, token, ms)
  local held = base .. ':part:' .. token .. ':follow_ups'
  if (own(redis.pcall('HLEN', held)) or 0) == 0 then
    return
  elseif ms > 0 then
    redis.call('HSET', held, 'forgotten', '1')
    redis.call('PEXPIRE', held, digits(ms))
  elseif redis.call('HEXISTS', held, 'forgotten') == 0 then
    redis.call('PERSIST', held)
  end
end

-- Returns what the run of a follow-up learns of the batch that has `ended`. `kept`: the home, the id and the meta of the batch, as they are
-- held.
local function told_of_batch(kept, token, ending, ended)
  local told = {home = kept[1], id = kept[2], meta = kept[3] or nil, token = token, endings = tonumber(ending)}
  for _, name in ipairs({'added', 'finished', 'failed', 'cancelled'}) do
    told[name] = valid_option('whole', ended[name]) and ended[name] or 0
  end
  told.ended_at = is_digits(ended.ended_at) and ended.ended_at or digits(now_ms())
  local reason = ended.cancel_reason
  told.cancel_reason = type(reason) == 'string' and is_utf8(reason) and reason or nil
  return told
end

-- The same of a job. Any program may have written the message.
local function told_of_job(kept, ended)
  local told = {home = kept[1], meta = kept[3] or nil, outcome = ended.outcome}
  told.id, told.value = is_line(ended.id) and ended.id or '', type(ended.value) == 'string' and ended.value or ''
  told.reason = type(ended.reason) == 'string' and is_utf8(ended.reason) and ended.reason or ''
  told.ended_at = is_digits(ended.ended_at) and ended.ended_at or digits(now_ms())
  return told
end

-- Enqueues a follow-up that this queue holds, once for each `ending`, a number as text. `ended`: the facts of the ending. Nothing more is
-- held after the `final` one of a job. Returns ok, stored (before) or unknown (this queue does not hold it), and how many tasks became
-- claimable.
local function put_held(base, token, kind, ending, ended)
  local held = base .. ':part:' .. token .. ':follow_ups'
  local kept = own(redis.pcall('HMGET', held, 'home', 'id', 'meta', kind .. '_options', kind .. '_task', 'ending ' .. ending)) or {}
  local o, task, is_job = follow_up_options(kept[4]), kept[5], type(ended.outcome) == 'string' and string.find(ended.outcome, '^%l+$')
  if kept[6] then
    return 'stored', 0
  elseif not (o and task and is_line(kept[1]) and is_line(kept[2])) then
    return 'unknown', 0
  elseif is_job and ended.final then
    redis.call('DEL', held)
  end
  redis.call('HSET', held, 'ending ' .. ending, '1')
  if is_job and ended.final then
    redis.call('HSET', held, 'forgotten', '1') -- the message of the dispatch, that they are to be held, may come later
    redis.call('PEXPIRE', held, HELD_AFTER_END)
  end
  local told = is_job and told_of_job(kept, ended) or told_of_batch(kept, token, ending, ended)
  return 'ok', enqueue_follow_up(base, follow_up_id(base, token, kind, tonumber(ending)), o, task, told, false)
end

-- Follow-ups of one job. Its record has the field `follow`: their token, and the bases of the queues that hold them: `then`, or empty, and
-- `otherwise`, or empty; a line each. They are held as those of a batch whose home is another queue.

-- Returns the field `follow` of a record as a table; nil if it is none.
local function parsed_follow(text)
  local token, after, otherwise = string.match(text or '', '^(%w+)\n([^\n]*)\n([^\n]*)$')
  return is_random(token) and {token = token, ['then'] = after, otherwise = otherwise} or nil
end

-- Returns the field `follow` of a record, from the option of a dispatch.
local function follow_field(option)
  return option.token .. '\n' .. (option['then'] or '') .. '\n' .. (option.otherwise or '')
end

-- True if the value can be the option `follow` of a dispatch.
local function is_follow(value)
  if type(value) ~= 'table' or not is_random(value.token) then
    return false
  end
  for _, kind in ipairs({'then', 'otherwise'}) do
    local to = value[kind]
    if to ~= nil and not (is_line(to) and string.find(to, '{', 1, true)) then
      return false
    end
  end
  return value['then'] ~= nil or value.otherwise ~= nil
end

-- Tells the queue `to` for how many ms to hold follow-ups.
local function keep_at(base, token, to, ms)
  if to == base then
    keep_held(base, token, ms)
  elseif to ~= '' then
    post_keep(base, token, {to}, ms)
  end
end

-- Tells the queues that hold the follow-ups of a job for how many ms to do so: 0 when the job is stored. `text`: the field `follow` of its
-- record.
local function keep_follow_ups_of(base, text, ms)
  local follow = parsed_follow(text)
  if follow then
    keep_at(base, follow.token, follow['then'], ms)
    if follow.otherwise ~= follow['then'] then
      keep_at(base, follow.token, follow.otherwise, ms)
    end
  end
end

-- Returns the field `follow` of a record, in which the `option` of a dispatch replaces the text `old`; either may be missing.
local function replace_follow(base, old, option)
  local new = option and follow_field(option)
  if old then
    keep_follow_ups_of(base, old, FOLLOW_UP_EXPIRE)
  end
  if new then
    keep_follow_ups_of(base, new, 0)
  end
  return new
end

-- Notes that a job with follow-ups has ended, for count_members. `text`: the field `follow` of its record. `facts`: id, number, outcome,
-- value, reason and final (it cannot be put back).
local function note_follow_ups(text, facts)
  local follow = parsed_follow(text)
  if follow then -- else another program wrote it
    local ends = member_changes[FOLLOW_UPS] or {}
    member_changes[FOLLOW_UPS] = ends
    ends[#ends + 1] = {follow = follow, facts = facts}
  end
end

-- Sends the follow-ups of jobs that have ended: `then` of one that has finished, else `otherwise`. One that this queue does not hold is
-- left to the relay, which logs that. Returns how many tasks became claimable.
local function send_follow_ups(base, ends)
  local ready = 0
  for _, ended in ipairs(ends) do
    local follow, facts = ended.follow, ended.facts
    local is_finished = facts.outcome == 'finished' or facts.outcome == 'large'
    local kind = is_finished and 'then' or 'otherwise'
    local to, other, number = follow[kind], follow[is_finished and 'otherwise' or 'then'], facts.number
    local status, put = 'unknown'
    if to == base then
      status, put = put_held(base, follow.token, kind, number, facts)
      ready = ready + put
    end
    if to ~= '' and status == 'unknown' then
      post(base, 'release ' .. follow.token .. ' ' .. number, {'release', to, follow.token, kind, number, cmsgpack.pack(facts)})
    end
    if facts.final and other ~= to then
      keep_at(base, follow.token, other, 1)
    end
  end
  return ready
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
  local parent = kept[7] and batch_to_rejoin(base, kept[7]) or false -- false also if its part is not stored any more
  local follow_up = redis.call('HMGET', batch, kind, kind .. '_options', kind .. '_task')
  if follow_up[1] then
    local facts = {home = base, id = id, token = kept[3], added = added, finished = finished, failed = failed,
      cancelled = cancelled, endings = endings, ended_at = digits(now), meta = kept[5] or nil,
      cancel_reason = kept[6] or nil}
    local sent, name = send_follow_up(base, kind, follow_up, facts, parent)
    if name then
      redis.call('HSET', batch, 'follow_up', name)
    end
    ready = sent
  end
  if parent then
    note_member(parent, kind == 'then' and 'finished' or 'failed', NESTED .. id)
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

-- A part of a batch: what one queue, or one shard of it, knows of a batch. And the outbox, which has messages for other queues.
-- A batch is a set of jobs that is counted together; a job of it is a member. Its record is with its home queue.
-- The hash `:part:TOKEN` has the version of the part (`v`), its home, its state (`sealed`: its producer adds nothing more;
-- `closed`: no member is left) and counters. The set `:part:TOKEN:members` has the ids of members that have not ended for good.
-- A member has its batch in the field `batch` of its record: the token, the home without the prefix of the mesh, and the id (batch_field).
-- What happens to members during a script is collected, and counted at its end by count_members: each script that may end a
-- job calls it. The hash `:outbox` has a message for each topic; a newer message of a topic replaces the older one.

local PART_EXPIRE = 86400000 -- ms for which a closed part is stored, in addition to the `keep` of its batch

local NESTED = '\n' -- before the id of a batch that is a member of another batch: no id of a job has this character
local FOLLOW_UPS = '\n' -- among member_changes, the ends of jobs that have follow-ups: no batch has this name

-- For each batch, the ids of the members that this script has added, put back or ended, by what happened to them.
local member_changes = {}

-- Notes what happens to a member: added, back (it was put back), finished, failed, cancelled or lost. `batch`: the field of its
-- record.
local function note_member(batch, change, id)
  if not string.find(batch, '^[^\n]') then
    return -- another program wrote it: there is no such batch
  end
  local changes = member_changes[batch] or {}
  member_changes[batch] = changes
  local ids = changes[change] or {}
  changes[change] = ids
  ids[#ids + 1] = id
end

-- Counts what this script did to members of batches. Returns how many tasks became claimable: follow-ups of batches and of jobs that
-- have ended. Called after the last token of the script is stored, because a follow-up takes the next one. Lists the jobs that the script
-- keeps, too.
local function count_members(base)
  local ready = next(member_changes) and settle_parts(base) or 0
  if kept_changes[1] then
    list_kept_changes(base)
  end
  if kept_changes.fired then
    list_fired_changes(base)
  end
  return ready
end

-- Puts a message for another queue into the outbox, and tells the leader.
local function post(base, topic, message)
  write_hash(base .. ':outbox', {[topic] = cmsgpack.pack(message)})
  announce_moment(base, 0)
end

-- Returns the key of a part.
local function part_key(base, token)
  return base .. ':part:' .. token
end

-- Calls change(some) for ids, at most 1,000 at a time, and returns the sum of its replies.
local function in_thousands(ids, change)
  local changed = 0
  for from = 1, #ids, 1000 do
    changed = changed + change({unpack(ids, from, math.min(from + 999, #ids))})
  end
  return changed
end

-- Adds ids to the members of a part; returns how many are new. A value of another application at the key is deleted: the key is
-- the queue's own.
local function add_members(members, ids)
  if not own(redis.pcall('SCARD', members)) then
    redis.call('DEL', members)
  end
  return in_thousands(ids, function(some)
    return redis.call('SADD', members, unpack(some))
  end)
end

-- Removes ids from the members of a part; returns how many were there.
local function remove_members(members, ids)
  return in_thousands(ids, function(some)
    return own(redis.pcall('SREM', members, unpack(some))) or 0
  end)
end

-- Returns true if a member may not be added to a part by the option `batch` of its dispatch: the part was closed at this version
-- or later, or cancelled, or sealed after the home gave that option.
local function is_closed(base, batch)
  local kept = own(redis.pcall('HMGET', part_key(base, batch.token), 'v', 'closed', 'cancel_reason', 'sealed')) or {}
  local is_closed_now = kept[2] or kept[3] or kept[4] and not batch.sealed
  return whole_number(kept[1], 0) >= batch.number and is_closed_now and true or false
end

-- Returns the suffix of ids that are generated in a shard of a queue; empty in the first one.
local function shard_suffix(base)
  return string.match(base, '(~%w+)}%-shard') or ''
end

-- Returns the field `batch` of members, one value a line. It is short, because each member has it: the prefix of the mesh is left
-- out, and an id that was generated.
local function batch_field(token, home, id)
  local is_generated = id == '@' .. token .. shard_suffix(home)
  return token .. '\n' .. string.match(home, '{.*$') .. (is_generated and '' or '\n' .. id)
end

-- Notes a new member. Returns the field of its record.
local function enter_batch(batch, id)
  local text = batch_field(batch.token, batch.home, batch.id)
  note_member(text, 'added', id)
  local entry = member_changes[text].entry
  if not entry or batch.number > entry.number then
    member_changes[text].entry = batch
  end
  return text
end

-- Opens a part at the version that its home has given to a producer, if it is newer.
local function write_part(part, batch)
  local v = whole_number(own(redis.pcall('HGET', part, 'v')), 0)
  if v < batch.number then
    write_hash(part, {v = batch.number, home = batch.home, id = batch.id, keep = batch.keep})
    redis.call('HDEL', part, 'closed', 'cancel_reason')
    redis.call('PERSIST', part)
  end
  if batch.sealed then
    redis.call('HSET', part, 'sealed', '1')
  end
  if batch.on_failed then
    redis.call('HSET', part, 'on_failed', batch.on_failed)
  end
end

-- Returns the counters of a part as text: added, finished, failed, cancelled, lost, and failures, from which a member that is put
-- back is not subtracted.
local function part_counts(base, token)
  local part = part_key(base, token)
  local kept = own(redis.pcall('HMGET', part, 'added', 'finished', 'failed', 'cancelled', 'lost', 'failures'))
    or {}
  for i = 1, 6 do
    kept[i] = digits(whole_number(kept[i], 0))
  end
  return table.concat(kept, ' ')
end

-- Sends the version, the state and the counters of a part to the home: in this script if the home is this queue, else by the
-- outbox. Returns how many tasks became claimable.
local function send_report(base, token)
  local kept = redis.call('HMGET', part_key(base, token), 'home', 'id', 'v', 'closed')
  local home, id, v, closed, counts = kept[1], kept[2], whole_number(kept[3], 0), kept[4] or '0', part_counts(base, token)
  if not (home and id) then
    return 0 -- another program has removed them, so no home can be told
  end
  local can_report = home == base and pcall(function()
    check_types(base)
    check_batch_types(base, id)
  end)
  if can_report then
    return take_report(base, id, token, {part = base, v = v, closed = closed == '1', counts = counts})
  end
  post(base, 'report ' .. token, {'report', home, id, token, base, digits(v), closed, counts})
  return 0
end

-- Sets the expiry of a closed part.
local function expire_part(part)
  local keep = whole_number(redis.call('HGET', part, 'keep'), 0)
  redis.call('PEXPIRE', part, digits(keep + PART_EXPIRE))
end

-- Closes a part that is sealed and has no member left, and reports it. Reports a new failure of an open part, if its batch is to
-- be cancelled then. Returns how many tasks became claimable.
local function settle_part(base, token, has_failed)
  local part = part_key(base, token)
  local kept = own(redis.pcall('HMGET', part, 'v', 'sealed', 'closed', 'on_failed')) or {}
  if not kept[1] or kept[3] then
    return 0
  end
  if kept[2] and redis.call('EXISTS', part .. ':members') == 0 then
    redis.call('HSET', part, 'closed', '1')
    expire_part(part)
  elseif not (has_failed and kept[4]) then
    return 0
  end
  return send_report(base, token)
end

-- Opens a part again for members that were put back, if it was closed, and reports it. Returns how many tasks became claimable.
local function reopen_part(base, token)
  local part = part_key(base, token)
  if redis.call('HDEL', part, 'closed') == 0 then
    return 0
  end
  add_to(part, 'v', 1)
  redis.call('HDEL', part, 'cancel_reason')
  redis.call('PERSIST', part)
  return send_report(base, token)
end

-- Removes members that have ended, and counts those that were there by their `outcome`.
local function count_ends(part, outcome, ids)
  local n = ids and remove_members(part .. ':members', ids) or 0
  if n > 0 then
    add_to(part, outcome, n)
  end
  if n > 0 and outcome == 'failed' then
    add_to(part, 'failures', n)
  end
end

-- Counts the `changes` of one part. Returns how many tasks became claimable.
local function count_changes(base, token, changes)
  local part, ready = part_key(base, token), 0
  local members = part .. ':members'
  if not own(redis.pcall('HLEN', part)) then
    redis.call('DEL', part) -- another application's value
  end
  if changes.entry then
    write_part(part, changes.entry)
  end
  count_ends(part, 'cancelled', changes.cancelled) -- first: a job in the trash ends when another one gets its id
  if changes.added then
    add_to(part, 'added', add_members(members, changes.added))
  end
  if changes.back then
    add_to(part, 'failed', -add_members(members, changes.back))
    ready = reopen_part(base, token)
  end
  for _, outcome in ipairs({'finished', 'failed', 'lost'}) do
    count_ends(part, outcome, changes[outcome])
  end
  return ready + settle_part(base, token, changes.failed)
end

-- Counts the collected changes of all parts, also those that follow from them. Returns how many tasks became claimable.
local function settle_parts(base)
  local ready = 0
  while next(member_changes) do
    local collected = member_changes
    member_changes = {}
    for batch, changes in pairs(collected) do
      ready = ready + (batch == FOLLOW_UPS and send_follow_ups(base, changes)
        or count_changes(base, string.match(batch, '^[^\n]+'), changes))
    end
  end
  return ready
end

-- Returns the field `batch` of a dead-letter record whose task becomes a member again; nil if its part is not stored any more. Also
-- returns true if it may not be put back now: its batch is being cancelled.
local function batch_to_rejoin(base, batch)
  local part = part_key(base, string.match(batch, '^[^\n]*'))
  local kept = own(redis.pcall('HMGET', part, 'v', 'closed', 'cancel_reason')) or {}
  return kept[1] and batch or nil, kept[3] and not kept[2]
end

-- Counts members without a record as lost: up to 100, chosen at random. A failover can lose a record that was just written.
local function drop_lost_members(base, token, batch)
  local members = own(redis.pcall('SRANDMEMBER', part_key(base, token) .. ':members', 100)) or {}
  for _, id in ipairs(members) do
    local nested = string.sub(id, 1, 1) == NESTED and string.sub(id, 2)
    local record = nested and base .. ':batch:' .. nested or base .. ':job:' .. id
    if redis.call('EXISTS', record, base .. ':active:' .. id) == 0 then
      note_member(batch, 'lost', id)
    end
  end
end

-- open_batch: stores the record of a batch, to which its producer may add jobs then.
-- ARGV[4] id of the batch
-- ARGV[5] token
-- ARGV[6] open_for ms without an addition after which the leader cancels it
-- ARGV[7] keep ms for which the record is stored after the end
-- ARGV[8] parent the option batch of a dispatch (msgpack), if it is a member of another batch; else empty
-- ARGV[9..] facts names and values: then and otherwise (base of the queue), on_failed (cancel), meta (JSON); and for a follow-up in this
--   queue then_options and otherwise_options (msgpack map), then_task and otherwise_task (bytes): another one holds its own, see
--   hold_follow_ups
-- RETURNS ok | exists (with another token) | closed (the part of the parent: open it again) | late
-- RESEND safe: the reply is stored under the producer's number
-- GROUP makes
-- NUMBERED
local function open_batch()
  local queue = KEYS[1]
  local id, token, open_for, keep, parent = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
  local batch, batches = queue .. ':batch:' .. id, queue .. ':batches'

  -- What the facts may be, each as an option of a dispatch, see jobs.lua.
  local FACTS = {['then'] = 'line', then_options = 'packed', then_task = 'string', otherwise = 'line',
    otherwise_options = 'packed', otherwise_task = 'string', on_failed = ' cancel ', meta = 'meta'}

  -- True if the fact `name` may have this value.
  local function is_fact(name, value)
    local kind = FACTS[name]
    if kind == 'packed' then
      return follow_up_options(value) ~= nil
    end
    return kind and value and (kind == 'line' and is_line(value) or valid_option(kind, value))
  end

  check_types(queue)
  redis.call('ZCARD', batches)
  if not (is_line(id) and is_random(token) and is_digits(open_for) and is_digits(keep)) then
    return redis.error_reply('ERR the id, the token, open_for and keep of a batch cannot be that')
  end
  local now = now_ms()
  local fields = {id = id, token = token, state = 'open', made_at = digits(now), open_for = open_for,
    open_until = digits(now + tonumber(open_for)), keep = keep}
  for i = 9, #ARGV, 2 do
    local fact, value = ARGV[i], ARGV[i + 1]
    if not is_fact(fact, value) then
      return redis.error_reply('ERR the fact ' .. fact .. ' of a batch cannot be that')
    end
    fields[fact] = value
  end
  for _, kind in ipairs({'then', 'otherwise'}) do
    local is_here = fields[kind] == queue
    if is_here ~= (fields[kind .. '_options'] ~= nil) or is_here ~= (fields[kind .. '_task'] ~= nil) then
      return redis.error_reply('ERR the follow-up ' .. kind
        .. ' of a batch needs options and a task, and one of another queue has none here')
    end
  end
  if redis.call('HLEN', batch) > 0 then -- of its producer, an addition may have been given up before the reply
    return {redis.call('HGET', batch, 'token') == token and 'ok' or 'exists'}
  end
  local outer = parent ~= '' and cmsgpack.unpack(parent)
  if outer and not is_batch(outer) then
    return redis.error_reply('ERR the parent of a batch cannot be that')
  elseif outer and is_closed(queue, outer) then
    return {'closed'}
  end
  fields.parent = outer and enter_batch(outer, NESTED .. id) or nil
  write_hash(batch, fields)
  check_batch_in(queue, id, tonumber(open_for), now)
  post_keep(queue, token, {fields['then'] or false, fields.otherwise}, 0)
  wake(queue, count_members(queue))
  return {'ok'}
end

-- open_part: opens a part of a batch, so that jobs of its queue can be added. A part that is open keeps its version. To a sealed
-- batch, only running jobs of it add more.
-- ARGV[1] id of the batch
-- ARGV[2] token of the batch; empty: of any
-- ARGV[3] part base of its queue
-- ARGV[4] max_parts
-- ARGV[5] inside 1: a running job of the batch adds jobs
-- RETURNS ok version sealed token keep on_failed | cancelled reason | sealed | ended | unknown | full; in ok, sealed is 1 if its
--   producer adds nothing more
-- RESEND safe: a copy finds the part open
local function open_part()
  local queue = KEYS[1]
  local id, token, part, max_parts, inside = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1'
  local batch, parts, batches = queue .. ':batch:' .. id, queue .. ':batch:' .. id .. ':parts', queue .. ':batches'

  redis.call('ZCARD', batches)
  local kept = redis.call('HMGET', batch, 'token', 'state', 'cancel_reason', 'open_for', 'keep', 'on_failed')
  local v, open, counts = known_part(redis.call('HGET', parts, part))
  if not kept[1] or token ~= '' and kept[1] ~= token then
    return {'unknown'}
  elseif kept[3] then
    return {'cancelled', kept[3]}
  elseif kept[2] == 'ended' then
    return {'ended'}
  elseif kept[2] == 'sealed' and not inside then
    return {'sealed'}
  end
  if v == 0 and redis.call('HLEN', parts) >= max_parts then
    return {'full'}
  elseif not open then
    add_to(batch, 'open', 1)
    v = v + 1
    redis.call('HSET', parts, part, digits(v) .. ' 1 ' .. counts)
  end
  local now, sealed = now_ms(), kept[2] == 'sealed'
  if not sealed then
    local open_for = whole_number(kept[4], 3600000)
    redis.call('HSET', batch, 'open_until', digits(now + open_for))
    check_batch_in(queue, id, open_for, now)
  end
  return {'ok', digits(v), sealed and 1 or 0, kept[1], kept[5], kept[6] or ''}
end

-- seal_batch: its producer adds nothing more to a batch. If no part is open, the batch ends.
-- ARGV[1] id of the batch
-- ARGV[2] token of the batch
-- RETURNS ok state keep [part version]...: the open parts, which are to be told | unknown
-- RESEND safe: a copy finds the batch sealed
-- GROUP seldom
-- FLAGS allow-oom
local function seal_batch()
  local queue = KEYS[1]
  local id, token = ARGV[1], ARGV[2]
  local batch, batches = queue .. ':batch:' .. id, queue .. ':batches'

  check_types(queue)
  redis.call('ZCARD', batches)
  redis.call('HLEN', batch .. ':parts')
  local kept = redis.call('HMGET', batch, 'token', 'state', 'keep')
  if kept[1] ~= token then
    return {'unknown'}
  end
  local now = now_ms()
  if kept[2] == 'open' then
    redis.call('HSET', batch, 'state', 'sealed', 'sealed_at', digits(now))
    check_batch_in(queue, id, FIRST_CHECK, now)
    notify_batch(queue, id, 'sealed')
    wake(queue, end_if_complete(queue, id, now) + count_members(queue))
  end
  local reply = {'ok', redis.call('HGET', batch, 'state'), kept[3]}
  for _, part in ipairs(parts_of(batch)) do
    if part.open then
      reply[#reply + 1], reply[#reply + 2] = part.base, digits(part.v)
    end
  end
  return reply
end

-- report_part: what a part of another queue reports to the home of its batch. If all parts have closed, the batch ends.
-- ARGV[1] id of the batch
-- ARGV[2] token of the batch
-- ARGV[3] part base of its queue
-- ARGV[4] version of the part
-- ARGV[5] closed 1: no member is left
-- ARGV[6] counts added, finished, failed, cancelled, lost, failures; with spaces
-- RETURNS ok
-- RESEND safe: of two reports, the one with the lower version changes nothing; so does one of the same version after it closed
-- GROUP seldom
-- FLAGS allow-oom
local function report_part()
  local queue = KEYS[1]
  local id, token, part, version, closed, counts = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1', ARGV[6]
  local batch, batches = queue .. ':batch:' .. id, queue .. ':batches'

  check_types(queue)
  if not (is_line(part) and is_digits(version) and is_counts(counts)) then
    return redis.error_reply('ERR the part, the version and the counts of a report cannot be that')
  end
  redis.call('ZCARD', batches)
  redis.call('HLEN', batch)
  redis.call('HLEN', batch .. ':parts')
  local ready = take_report(queue, id, token, {part = part, v = tonumber(version), closed = closed, counts = counts})
  wake(queue, ready + count_members(queue))
  return {'ok'}
end

-- cancel_batch: cancels a batch that has not ended. It takes no jobs any more, and its parts get messages.
-- ARGV[1] id of the batch
-- ARGV[2] token of the batch; empty: of any
-- ARGV[3] reason text for callers that wait for a result
-- RETURNS ok | ended | unknown
-- RESEND safe: a copy finds the batch cancelled
-- GROUP seldom
-- FLAGS allow-oom
local function cancel_batch()
  local queue = KEYS[1]
  local id, token, reason = ARGV[1], ARGV[2], ARGV[3]
  local batch, batches = queue .. ':batch:' .. id, queue .. ':batches'

  check_types(queue)
  redis.call('ZCARD', batches)
  redis.call('HLEN', batch .. ':parts')
  local kept = redis.call('HMGET', batch, 'token', 'state', 'cancel_reason')
  if not kept[1] or token ~= '' and kept[1] ~= token then
    return {'unknown'}
  elseif kept[2] == 'ended' then
    return {'ended'}
  end
  if not kept[3] then
    wake(queue, abandon_batch(queue, id, reason, now_ms()) + count_members(queue))
  end
  return {'ok'}
end

-- check_batches: what the leader does for batches whose next check is due: it tells open parts of sealed and of cancelled ones again,
-- cancels those that their producer has left open, and forgets those that ended long ago.
-- ARGV[1] limit batches in one call
-- RETURNS ok entry... | more entry...: more are due; an entry is id, token, cancel reason (false: none), keep, and the bases and
--   versions of parts to tell
-- RESEND safe: a copy looks at the batches that are due then
-- GROUP seldom
-- FLAGS allow-oom
local function check_batches()
  local queue = KEYS[1]
  local limit = tonumber(ARGV[1])
  local batches = queue .. ':batches'

  check_types(queue)
  local now = now_ms()
  local ids = redis.call('ZRANGEBYSCORE', batches, '-inf', digits(now), 'LIMIT', 0, limit)
  local reply, ready = {#ids == limit and 'more' or 'ok'}, 0
  for _, id in ipairs(ids) do
    local batch = batch_key(queue, id)
    local kept = own(redis.pcall('HMGET', batch, 'state', 'open_until', 'ended_at', 'keep', 'token')) or {}
    local state, forgotten_at = kept[5] and kept[1], whole_number(kept[3], 0) + whole_number(kept[4], 0)
    if state == 'ended' and forgotten_at <= now and has_release(queue, batch) then
      check_batch_in(queue, id, FIRST_CHECK, now)
    elseif not state or state == 'ended' and forgotten_at <= now then
      forget_batch(queue, id)
    elseif state == 'ended' then
      check_batch_in(queue, id, forgotten_at, 0)
    elseif state == 'open' and whole_number(kept[2], 0) > now then
      check_batch_in(queue, id, tonumber(kept[2]), 0)
    elseif state ~= 'sealed' then
      ready = ready + abandon_batch(queue, id, 'its producer left it open', now)
    else
      reply[#reply + 1] = check_entry(queue, id, now)
    end
  end
  wake(queue, ready + count_members(queue))
  return reply
end

-- read_batch: what is stored about a batch.
-- ARGV[1] id of the batch
-- RETURNS ok id facts parts: facts are names and values, parts for each part the base of its queue, its version, 1 if it is open,
--   and its counters | unknown
-- RESEND safe: it only reads
-- FLAGS no-writes
local function read_batch()
  local queue = KEYS[1]
  local id = ARGV[1]
  local batch = queue .. ':batch:' .. id

  if (own(redis.pcall('HLEN', batch)) or 0) == 0 then
    return {'unknown'}
  end
  return {'ok', unpack(batch_entry(queue, id))}
end

-- list_batches: batches at home in a queue, by when the leader looks at them next: those that have not ended mostly come first.
-- ARGV[1] first rank
-- ARGV[2] limit
-- RETURNS ok number entry...: number is how many there are; an entry is that of read_batch
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_batches()
  local queue = KEYS[1]
  local first, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
  local batches = queue .. ':batches'

  local reply = {'ok', own(redis.pcall('ZCARD', batches)) or 0}
  for _, id in ipairs(own(redis.pcall('ZRANGE', batches, first, first + limit - 1)) or {}) do
    reply[#reply + 1] = batch_entry(queue, id)
  end
  return reply
end

-- close_part: its producer adds nothing more to a batch. The part closes if no member is left, and reports that, also if it had closed
-- before. A part that was opened and got no member is stored as closed, so that a late dispatch is refused.
-- ARGV[1] token of the batch
-- ARGV[2] version of the part
-- ARGV[3] home base of its queue
-- ARGV[4] id of the batch
-- ARGV[5] keep ms
-- RETURNS ok
-- RESEND safe: a copy reports the same again
-- GROUP seldom
-- FLAGS allow-oom
local function close_part()
  local queue = KEYS[1]
  local token, version, home, id, keep = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
  local part = queue .. ':part:' .. token
  local told = {token = token, number = version, home = home, id = id, keep = keep, sealed = true}

  check_types(queue)
  if not is_batch(told) then
    return redis.error_reply('ERR the token, the version, the home, the id and keep of a batch cannot be that')
  end
  redis.call('HLEN', part)
  redis.call('SCARD', part .. ':members')
  write_part(part, told)
  drop_lost_members(queue, token, batch_field(token, home, id))
  local ready
  if redis.call('HEXISTS', part, 'closed') == 1 then
    expire_part(part)
    ready = send_report(queue, token)
  else
    ready = settle_part(queue, token)
  end
  wake(queue, ready + count_members(queue))
  return {'ok'}
end

-- cancel_part: cancels the members of a part, in steps, because its batch was cancelled. A part of a later version is left alone: a
-- member was put back since.
-- ARGV[1] token of the batch
-- ARGV[2] version of the part
-- ARGV[3] home base of its queue
-- ARGV[4] id of the batch
-- ARGV[5] keep ms
-- ARGV[6] reason text for callers that wait for a result
-- ARGV[7] cursor of SSCAN, 0 at first
-- ARGV[8] budget members to look at in one call
-- RETURNS ok | more cursor
-- RESEND safe: a copy cancels what is left
-- GROUP seldom
-- FLAGS allow-oom
local function cancel_part()
  local queue = KEYS[1]
  local token, version, home, id, keep = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
  local part, part_members = queue .. ':part:' .. token, queue .. ':part:' .. token .. ':members'
  local told = {token = token, number = version, home = home, id = id, keep = keep, sealed = true}
  local reason, cursor, budget = ARGV[6], ARGV[7], ARGV[8]

  version = whole_number(version, 0)
  check_types(queue)
  if not is_batch(told) then
    return redis.error_reply('ERR the token, the version, the home, the id and keep of a batch cannot be that')
  end
  redis.call('SCARD', part_members)
  redis.call('ZCARD', queue .. ':batches')
  local holders = cursor == '0' and claim_holders(queue)
  if whole_number(redis.call('HGET', part, 'v'), 0) > version then
    return {'ok'}
  end
  write_part(part, told)
  redis.call('HSET', part, 'cancel_reason', reason)
  drop_lost_members(queue, token, batch_field(token, home, id))
  if holders then
    cancel_running_members(queue, holders, part_members, reason)
  end
  local found = redis.call('SSCAN', part_members, cursor, 'COUNT', budget)
  local ready = cancel_members(queue, found[2], reason)
  ready = ready + (redis.call('HEXISTS', part, 'closed') == 1 and send_report(queue, token) or settle_part(queue, token))
  wake(queue, ready + count_members(queue))
  give_room(queue)
  if found[1] == '0' then
    return {'ok'}
  end
  return {'more', found[1]}
end

-- read_part: what a queue knows of a batch.
-- ARGV[1] token of the batch
-- RETURNS ok members name value...: members is how many have not ended
-- RESEND safe: it only reads
-- FLAGS no-writes
local function read_part()
  local queue = KEYS[1]
  local token = ARGV[1]
  local part, part_members = queue .. ':part:' .. token, queue .. ':part:' .. token .. ':members'

  local reply = own(redis.pcall('HGETALL', part)) or {}
  table.insert(reply, 1, own(redis.pcall('SCARD', part_members)) or 0)
  table.insert(reply, 1, 'ok')
  return reply
end

-- hold_follow_ups: stores follow-ups of a batch whose home is another queue in their own queue, before the batch is opened; or those of one
-- job, before it is dispatched. The producer
-- sends it, so it needs the right to write to this queue; the messages that enqueue a follow-up later carry no task. Kept for
-- `kept_for`, unless the home says longer.
-- ARGV[1] token of the batch
-- ARGV[2] home base of its queue
-- ARGV[3] id of the batch; of a job, the token
-- ARGV[4] kept_for ms
-- ARGV[5..] facts names and values: then_options and otherwise_options (msgpack map), then_task and otherwise_task (bytes), meta (JSON)
-- RETURNS ok
-- RESEND safe: a copy changes nothing
local function hold_follow_ups()
  local queue = KEYS[1]
  local token, home, id, kept_for = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
  local follow_ups = queue .. ':part:' .. token .. ':follow_ups'

  local FACTS = {then_options = 'packed', then_task = 'string', otherwise_options = 'packed', otherwise_task = 'string',
    meta = 'meta'}

  check_types(queue)
  if not (is_line(home) and is_line(id) and is_digits(kept_for)) then
    return redis.error_reply('ERR the home, the id and kept_for of a follow-up cannot be that')
  end
  local fields = {home = home, id = id}
  for i = 5, #ARGV, 2 do
    local fact, value = ARGV[i], ARGV[i + 1]
    local kind = FACTS[fact]
    if not (kind and value and (kind == 'packed' and follow_up_options(value) or valid_option(kind, value))) then
      return redis.error_reply('ERR the fact ' .. fact .. ' of a follow-up cannot be that')
    end
    fields[fact] = value
  end
  if redis.call('HLEN', follow_ups) == 0 then
    write_hash(follow_ups, fields)
    redis.call('PEXPIRE', follow_ups, kept_for)
  end
  return {'ok'}
end

-- keep_follow_ups: for how long a queue holds the follow-ups of a batch of another home. Once it has a limit, it keeps it.
-- ARGV[1] token of the batch
-- ARGV[2] kept_for ms; 0: until the home says more
-- RETURNS ok
-- RESEND safe: a copy of the first request that arrives after the last one changes nothing
-- FLAGS allow-oom
local function keep_follow_ups()
  local queue = KEYS[1]
  local token, kept_for = ARGV[1], tonumber(ARGV[2])

  keep_held(queue, token, kept_for)
  return {'ok'}
end

-- put_follow_up: enqueues a follow-up that this queue holds for a batch or a job of another queue, once for each ending.
-- ARGV[1] token of the batch
-- ARGV[2] kind then or otherwise
-- ARGV[3] ending its number; of a job, the number of its end
-- ARGV[4] facts of the ending (msgpack map): added, finished, failed, cancelled, ended_at, cancel_reason; of a job id, outcome, value, reason,
--   ended_at and final (there is no further end)
-- RETURNS ok | stored (before) | unknown (this queue does not hold it)
-- RESEND safe: fenced by the number of the ending
-- GROUP seldom
-- FLAGS allow-oom
local function put_follow_up()
  local queue = KEYS[1]
  local token, kind, ending, facts = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

  check_types(queue)
  local known, ended = pcall(cmsgpack.unpack, facts)
  if not (known and type(ended) == 'table' and is_random(token) and is_token(ending) and tonumber(ending) > 0) then
    return redis.error_reply('ERR the token, the ending and the facts of a follow-up cannot be that')
  end
  local status, ready = put_held(queue, token, kind, ending, ended)
  wake(queue, ready + count_members(queue))
  return {status}
end

-- take_outbox: messages of a queue for other queues, which are to be delivered and then dropped.
-- ARGV[1] limit messages, about
-- RETURNS ok entry...: an entry is the topic, the message as it is stored, and its parts: report, home, id, token, part, version,
--   closed and counts; cancel, part, token, version, home, id, keep and reason; release, queue, token, kind,
--   ending and facts (msgpack map); keep, queue, token and ms; ended, queue of the parent, its id, life, key, number, outcome and
--   value; cancel_child, queue, parent, life, id and reason; or look, queue, parent, life, key, after and id. None if another program
--   wrote it
-- RESEND safe: it only reads
-- FLAGS no-writes
local function take_outbox()
  local queue = KEYS[1]
  local limit = tonumber(ARGV[1])
  local outbox = queue .. ':outbox'

  local reply, cursor = {'ok'}, '0'
  repeat
    local found = redis.call('HSCAN', outbox, cursor, 'COUNT', limit)
    cursor = found[1]
    for i = 1, #found[2], 2 do
      local is_read, message = pcall(cmsgpack.unpack, found[2][i + 1])
      reply[#reply + 1] = {found[2][i], found[2][i + 1], is_read and type(message) == 'table' and message or {}}
    end
  until cursor == '0' or #reply > limit
  return reply
end

-- drop_outbox: deletes delivered messages. A topic that has a newer message keeps it.
-- ARGV[1..] delivered topics and messages, in turn
-- RETURNS ok
-- RESEND safe: a copy deletes only the same messages
-- FLAGS allow-oom
local function drop_outbox()
  local queue = KEYS[1]
  local outbox = queue .. ':outbox'

  for i = 1, #ARGV, 2 do
    local delivered, message = ARGV[i], ARGV[i + 1]
    if redis.call('HGET', outbox, delivered) == message then
      redis.call('HDEL', outbox, delivered)
    end
  end
  return {'ok'}
end
