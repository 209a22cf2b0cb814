-- A part of a batch: what one queue, or one shard of it, knows of a batch. And the outbox, which has messages for other queues.
-- A batch is a set of jobs that is counted together; a job of it is a member. Its record is with its home queue (_batch.lua).
-- The hash `:part:TOKEN` has the version of the part (`v`), its home, its state (`sealed`: its producer adds nothing more;
-- `closed`: no member is left) and counters. The set `:part:TOKEN:members` has the ids of members that have not ended for good.
-- A member has its batch in the field `batch` of its record: the token, the home without the prefix of the mesh, and the id (batch_field).
-- What happens to members during a script is collected, and counted at its end by count_members: each script that may end a
-- job calls it. The hash `:outbox` has a message for each topic; a newer message of a topic replaces the older one.

local PART_EXPIRE = 86400000 -- ms for which a closed part is stored, in addition to the `keep` of its batch

local NESTED = '\n' -- before the id of a batch that is a member of another batch: no id of a job has this character

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

-- Counts what this script did to members of batches. Returns how many tasks became claimable: follow-ups of batches that have
-- ended. Called after the last token of the script is stored, because a follow-up takes the next one.
local function count_members(base)
  return next(member_changes) and settle_parts(base) or 0
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
-- or later, or cancelled.
-- LATER: most jobs are in no batch.
local function is_closed(base, batch)
  local kept = own(redis.pcall('HMGET', part_key(base, batch.token), 'v', 'closed', 'cancel_reason')) or {}
  return whole_number(kept[1], 0) >= batch.number and (kept[2] or kept[3]) and true or false
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
-- LATER: most jobs are in no batch.
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
local function open_part(part, batch)
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
    return 0 -- another program has removed them, and with them where to report
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
    open_part(part, changes.entry)
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
-- LATER: most queues have no batches.
local function settle_parts(base)
  local ready = 0
  while next(member_changes) do
    local collected = member_changes
    member_changes = {}
    for batch, changes in pairs(collected) do
      ready = ready + count_changes(base, string.match(batch, '^[^\n]+'), changes)
    end
  end
  return ready
end

-- Returns the field `batch` of a dead-letter record whose task becomes a member again; nil if its part is not stored any more. Also
-- returns true if it may not be put back now: its batch is being cancelled.
-- LATER: few failed tasks are in a batch.
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
