-- A start: how a worker takes tasks of the lists into claims, and what a repeated request returns. Whose turn it is among lanes is
-- in _turns.lua.

local MOST_WANTED = 10000 -- tasks: more than any program of worqr asks for

-- Returns the reply to a start that claims nothing: the worker does not serve the queue, or the request is a copy. For any
-- other request: nil, and the claim under which the worker took its last suspect. `admission`: that of the worker (nil:
-- none).
local function repeated_start(base, admission, number)
  if not admission then
    return {'not_serving'}
  end
  local last, first, taken, suspect = string.match(admission, '^(%d+) (%d+) (%d+) (%d+)$')
  last = tonumber(last)
  if last and number > last then
    return nil, suspect
  end
  first, taken = whole_number(first, nil, NEVER), whole_number(taken, nil, MOST_WANTED)
  if not (first and taken) or last > LARGEST then
    return nil, '0' -- another program wrote it
  elseif number < last then
    return {'late'}
  end
  local reply = {'ok', digits(first)}
  for i = 0, taken - 1 do
    local item = own(redis.pcall('LINDEX', base .. ':claim:' .. digits(first + i), 0))
    reply[#reply + 1] = entry_of(base, item) or false
  end
  return reply
end

-- True if the job was to begin before now and never began.
local function is_expired(fields, now)
  local until_ms, after_ms = whole_number(fields.expires_at), whole_number(fields.expires)
  if after_ms then
    until_ms = whole_number(fields.run_at, 0) + after_ms
  end
  return until_ms and now > until_ms and not fields.started
end

-- Moves the last item of the list `source` under `claim` of `worker`. The caller adds the claim to the worker's set of
-- claims. Returns one of: taken, the entry, its size in bytes and its lane; empty; expired (the job went to the
-- dead-letter queue); skipped; suspect and its id. A reference is skipped, and removed, if its record is gone, has no task or
-- does not wait there: a job of this id may have been dispatched again, in another lane. A suspect of a lane, whose list is the `source` then, is moved to the suspects instead.
local function claim_one(base, source, worker, claim, now, of_lane)
  local held = base .. ':claim:' .. claim
  local item = redis.pcall('RPOPLPUSH', source, held)
  if item and item.err then -- another application's value at the key of a claim that no worker holds yet
    own(item)
    redis.call('DEL', held)
    item = redis.call('RPOPLPUSH', source, held)
  end
  if not item then
    return 'empty'
  end
  local id = job_id(item)
  if not id then
    return 'taken', item, #item
  end
  local job, active = base .. ':job:' .. id, base .. ':active:' .. id
  local kept = own(redis.pcall('HMGET', job, 'state', 'suspect', 'lane')) or {}
  local lane, claims_of_lanes = kept[3] or nil, base .. ':lanes:claims'
  local elsewhere = lane ~= of_lane -- a suspect of a lane waits among the suspects with its place
    and (source ~= base .. ':suspects' or redis.call('HEXISTS', claims_of_lanes, ':' .. id) == 0)
  if kept[1] ~= 'waiting' or elsewhere or redis.call('HEXISTS', job, 'task') == 0 then
    redis.call('DEL', held)
    return 'skipped'
  elseif of_lane and kept[2] then
    redis.call('RPOPLPUSH', held, base .. ':suspects')
    return 'suspect', id
  end
  redis.call('RENAME', job, active)
  redis.call('HSET', active, 'claim', claim, 'worker', worker, 'state', 'active')
  local entry, fields = entry_of(base, item)
  if is_expired(fields, now) and expire(base, item, id, claim, worker, fields, now) then
    return 'expired'
  end
  notify(base, id, 'active')
  return 'taken', entry, #fields.task + whole_number(fields.saved_size, 0, MOST_KEPT), fields.lane
end

-- Adds the claims of the `start` to `held`, the set of their worker's claims, and to what limits count, if there are limits. Stores
-- the last claim.
local function note_claims(start, held, has_limits)
  local base, claims = start.base, start.mine
  for from = 1, #claims, 1000 do
    redis.call('SADD', held, unpack(claims, from, math.min(from + 999, #claims)))
  end
  if has_limits and #claims > 0 then
    note_starts(base, claims, start.now)
  end
  if start.taken > 0 then
    store_token(base, start.next_claim + start.taken - 1)
    renew_counts(base)
  end
end

-- Returns whether there are limits or a pause, whether there are lanes, and whether producers wait for room. Most queues have none
-- of these: one question.
local function what_exists(paused, limits, lanes, waiters)
  if redis.call('EXISTS', paused, limits, lanes, waiters) == 0 then
    return false, false, false
  end
  return redis.call('EXISTS', paused, limits) > 0, redis.call('EXISTS', lanes) == 1, redis.call('EXISTS', waiters) == 1
end

-- True if the `start` may take one more task. Fields of a start: base, worker, next_claim, now, wanted, room (how
-- many the limits allow), max_skipped, max_bytes; taken (numbers used up), skipped, bytes (of payload), reply, mine (claims).
local function may_take(start)
  return start.taken < start.wanted and #start.mine < start.room and start.skipped < start.max_skipped
    and start.bytes < start.max_bytes
end

-- Takes up to `most` tasks of the list, which is that of a `lane` (nil: of none). Returns the last status of claim_one, how many
-- items were taken from the list, and the id of a suspect. Stops at a suspect of a lane.
local function take(start, list, most, lane)
  local base, worker, now, reply, mine = start.base, start.worker, start.now, start.reply, start.mine
  local taken, skipped, bytes, room = start.taken, start.skipped, start.bytes, math.min(start.room, #mine + most)
  local status, items, id = 'taken', 0, nil
  while taken < start.wanted and #mine < room and skipped < start.max_skipped and bytes < start.max_bytes do
    local claim = digits(start.next_claim + taken)
    local entry, size, entry_lane
    status, entry, size, entry_lane = claim_one(base, list, worker, claim, now, lane)
    if status == 'taken' then
      taken, bytes, reply[#reply + 1], mine[#mine + 1] = taken + 1, bytes + size, entry, claim
      if entry_lane and not lane then
        move_place(base, entry_lane, entry[#entry], claim)
      end
    elseif status == 'expired' then
      taken, reply[#reply + 1] = taken + 1, false
    elseif status == 'skipped' then
      skipped = skipped + 1
    elseif status == 'empty' then
      break
    end
    items = items + 1
    if status == 'suspect' then
      id = entry
      break
    end
  end
  start.taken, start.skipped, start.bytes = taken, skipped, bytes
  return status, items, id
end

-- Takes the next tasks: of the list `source` or, if that is the queue's own list and the queue has lanes, of the lanes by turns.
-- Of the suspects, it takes one. Returns the status as take does.
local function next_tasks(start, source, has_lanes)
  if has_lanes and source == start.base then
    return take_turns(start)
  end
  return (take(start, source, source == start.base and start.wanted or 1))
end
