-- Children: jobs that the run of a workflow has started, and whose ends come back into its record.
-- The record of a child has the field `parent`: the base of the parent's queue, its id, its life, and the key of the child there, a
-- line each. The record of the parent has `child:KEY`: after, round, the base of the child's queue, and its id. An end has the number of
-- the claim by which the child ended, or of its place in the queue. Only an end with a number above `after` counts, and the first one.
-- Its field `above` says to workers which workflows are above it.
-- The child's slot remembers the end in `:ended:ID`, as the message that tells it. A message names the queue that it comes from by the
-- outbox that it was in: the end of a child counts if the parent has noted it in that queue.

local CHILD_EXPIRE = 3600000 -- ms for which an end is remembered
local AGAIN_EXPIRE = 2592000000 -- ms, 30 days: of a job that was put back, whose parent may be put back later
local MOST_CHILDREN = 1000 -- that one request notes
local END_BYTES = 65536 -- of a result; of a larger one, only the size is stored
local ABOVE_BYTES = 16384
local NEXT_LOOK = 2700000 -- ms; a lost message of an end is found within the time for which the end is remembered

-- Returns the field `parent` of a record as a table; nil if it is none.
local function parsed_parent(text)
  local base, id, life, key = string.match(text or '', '^([^\n]+)\n([^\n]+)\n(%d+)\n([^\n]+)$')
  return base and {base = base, id = id, life = life, key = key} or nil
end

-- Returns what the parent has noted of a child as a table; nil if it is not noted.
local function noted_child(text)
  local after, round, base, id = string.match(text or '', '^(%d+) (%d+) ([^\n]+)\n([^\n]+)$')
  return whole_number(after, nil, NEVER) and {after = tonumber(after), round = whole_number(round, 0), base = base, id = id} or nil
end

-- Returns the field `child:KEY` of a parent.
local function child_field(child)
  return digits(child.after) .. ' ' .. digits(child.round) .. ' ' .. child.base .. '\n' .. child.id
end

-- Returns the key of the record of this life of the job `id`, wherever it is; nil if there is none. Of the dead-letter records, the
-- newest 100 are read.
local function record_of_life(base, id, life)
  local job, cleared = base .. ':job:' .. id, cleared_up_to(base)
  if own(redis.pcall('HGET', base .. ':active:' .. id, 'life')) == life then
    return base .. ':active:' .. id
  end
  local kept = own(redis.pcall('HMGET', job, 'life', 'queued')) or {}
  if kept[1] == life and whole_number(kept[2], NEVER, NEVER) > cleared then
    return job
  end
  local claim = own(redis.pcall('HGET', base .. ':aside', id))
  for _ = 1, 100 do
    local found = claim and own(redis.pcall('HMGET', base .. ':aside:' .. claim, 'life', 'older'))
    if not found then
      return nil
    elseif found[1] == life then
      return base .. ':aside:' .. claim
    end
    claim = found[2]
  end
end

-- True if the suspended record `key` waits for children, of which `child` is one, and all of them have ended, or for the first of them.
local function waits_for_child(key, child)
  for _, wait in ipairs(open_waits(redis.call('HGET', key, 'open') or nil)) do
    local kind, _, _, _, about = read_wait(key, wait)
    local is_about = (kind == 'children' or kind == 'first') and string.find('\n' .. about .. '\n', '\n' .. child .. '\n', 1, true)
    if is_about and (kind == 'first' or all_ended(key, about)) then
      return true
    end
  end
  return false
end

-- Stores in the record `key` of a parent how many ms a child took that has ended.
local function note_time(key, child, now)
  local entry, at = string.match(redis.call('HGET', key, 'at:child:' .. child) or '', '^(%d+) (%d+) ')
  if whole_number(at, nil, LATEST) then
    redis.call('HSET', key, 'at:child:' .. child, entry .. ' ' .. at .. ' ' .. digits(math.max(0, now - at)))
  end
end

-- Returns how many bytes of a record the end of a child counts, beside what was counted when it was noted.
local function bytes_of_end(value)
  return math.max(0, #value - STEP_BYTES)
end

-- Returns the outcome of a child and its value, as they are stored where so many bytes are left: of a failure the type and the beginning
-- of the message, of a result the size, if there is no room for more.
local function fitting_end(outcome, value, room)
  local more = bytes_of_end(value)
  if #value <= END_BYTES and (more == 0 or more <= room) then
    return outcome, value
  elseif outcome == 'cancelled' then
    return outcome, truncated(value)
  elseif outcome ~= 'failed' then
    return 'large', digits(#value)
  end
  local read, told = pcall(cmsgpack.unpack, value)
  local short = {'', '', '', ''}
  for i = 1, read and type(told) == 'table' and 2 or 0 do
    short[i] = type(told[i]) == 'string' and truncated(told[i]) or ''
  end
  return outcome, cmsgpack.pack(short)
end

-- True if the parent with the record `key` is in the dead-letter queue, a put-back would drop the end of a child that is stored there, and
-- the end `number` is a later one: the child was put back by itself.
local function gives_way(base, key, ended, number)
  local outcome, before, stored = string.match(ended, '^(%l+) (%d+) (%d+) ')
  return outcome and outcome ~= 'finished' and outcome ~= 'large' and string.sub(key, 1, #base + 7) == base .. ':aside:'
    and number > tonumber(before) and tonumber(stored) == whole_number(redis.call('HGET', key, 'entries'), 0)
end

-- Stores the end of a child in the record of its parent, and wakes the parent if it waits for nothing else. `from`: the base of the
-- child's queue. `fact`: the number of the end, its outcome and its value. Returns how many tasks became claimable.
local function take_end(base, from, parent, fact, now)
  local key = record_of_life(base, parent.id, parent.life)
  local child = key and noted_child(redis.call('HGET', key, 'child:' .. parent.key))
  local earlier = child and redis.call('HGET', key, 'end:' .. parent.key)
  if not child or child.base ~= from or fact.number <= child.after
    or earlier and not gives_way(base, key, earlier, fact.number) then
    return 0
  end
  local kept = redis.call('HMGET', key, 'entries', 'saved_size', 'state')
  local size = whole_number(kept[2], 0)
  size = earlier and math.max(0, size - bytes_of_end(string.match(earlier, '^%l+ %d+ %d+ (.*)$'))) or size
  local outcome, value = fitting_end(fact.outcome, fact.value, MOST_KEPT - size)
  redis.call('HSET', key, 'saved_size', digits(size + bytes_of_end(value)), 'end:' .. parent.key,
    table.concat({outcome, digits(fact.number), digits(whole_number(kept[1], 0)), value}, ' '))
  note_time(key, parent.key, now)
  notify(base, parent.id, 'event')
  if kept[3] == 'suspended' and key == base .. ':job:' .. parent.id and waits_for_child(key, parent.key) then
    return wake_suspended(base, parent.id, now)
  end
  return 0
end

-- Tells the parent that the child `id` has ended, and remembers that. `text`: the field `parent` of its record. `number`: of the end.
-- `again`: it had failed before, and was put back.
local function tell_parent(base, id, text, number, outcome, value, again)
  local parent = parsed_parent(text)
  number = whole_number(number, 0, NEVER)
  if not parent then
    return -- another program wrote it
  end
  outcome, value = fitting_end(outcome, value, END_BYTES)
  local message = {'ended', parent.base, parent.id, parent.life, parent.key, digits(number), outcome, value}
  local ended = base .. ':ended:' .. id
  local ms = math.max(again and AGAIN_EXPIRE or CHILD_EXPIRE, redis.call('PTTL', ended))
  redis.call('SET', ended, cmsgpack.pack(message), 'PX', digits(ms))
  post(base, 'ended ' .. id, message)
end

-- Tells those who wait for the end of the job `id`: the workflow that has started it, and its follow-ups. `told`: the fields `parent`,
-- `follow` and `again` of its record, the `number` of the end, the `reason` why it failed (a word), and whether the end is `final`: the
-- job cannot be put back.
local function tell_end(base, id, told, outcome, value)
  if told.parent then
    tell_parent(base, id, told.parent, told.number, outcome, value, told.again)
  end
  if told.follow then
    local is_large = #value > END_BYTES
    note_follow_ups(told.follow, {id = id, number = digits(whole_number(told.number, 0, NEVER)), outcome = is_large and 'large' or outcome,
      value = is_large and digits(#value) or value, reason = told.reason or '', final = told.final, ended_at = digits(now_ms())})
  end
end

-- Returns how a job that failed ended, for those who wait for that: msgpack of the type of the error, its message, its traceback and its fields.
local function packed_failure(error_type, error_message, error_traceback, error_fields)
  local packed = cmsgpack.pack({error_type or '', error_message or '', error_traceback or '', error_fields or ''})
  return #packed <= END_BYTES and packed or cmsgpack.pack({error_type or '', truncated(error_message or ''), '', ''})
end

-- Posts the cancellation of a noted `child` of the workflow `id`.
local function cancel_one_child(base, child, id, life, reason)
  post(base, 'cancel_child ' .. child.id, {'cancel_child', child.base, id, life, child.id, reason})
end

-- Posts cancellations to the children of the workflow `id`, whose record `key` is about to be deleted, that have not ended.
local function cancel_children(base, key, id, life, reason)
  for _, name in ipairs(redis.call('HKEYS', key)) do
    local child_key = string.match(name, '^child:(.*)$')
    local child = child_key and noted_child(redis.call('HGET', key, name))
    if child and redis.call('HEXISTS', key, 'end:' .. child_key) == 0 then
      cancel_one_child(base, child, id, life, reason)
    end
  end
end

-- True for a text that can be a token.
local function is_token(value)
  return type(value) == 'string' and #value <= 16 and string.find(value, '^%d+$') ~= nil
end

-- True if the value can be the option `parent` of a dispatch: what note_children has replied, and what names the parent.
local function is_parent(value)
  return type(value) == 'table' and is_line(value.base) and string.find(value.base, '{', 1, true) and is_line(value.id)
    and is_token(value.life) and is_line(value.key) and is_token(value.after)
    and (value.above == nil or type(value.above) == 'string' and #value.above <= ABOVE_BYTES)
end

-- Returns the field `parent` of the record of a child, from the option of its dispatch.
local function parent_field(option)
  return table.concat({option.base, option.id, option.life, option.key}, '\n')
end

-- Tells the parent the end of the child `id` once more, if it has ended under a number above `after` and that is remembered: for an
-- hour, as long as the message is in the outbox, and as long as the child is in the dead-letter queue. Returns true then.
local function repeats_end(base, id, parent, after)
  local packed = own(redis.pcall('GET', base .. ':ended:' .. id)) or own(redis.pcall('HGET', base .. ':outbox', 'ended ' .. id))
  local read, message = pcall(cmsgpack.unpack, packed or '\144')
  if read and type(message) == 'table' and message[2] == parent.base and message[3] == parent.id and message[4] == parent.life
    and whole_number(message[6], 0, NEVER) > after and type(message[7]) == 'string' and type(message[8]) == 'string' then
    tell_parent(base, id, parent_field(parent), message[6], message[7], message[8])
    return true
  end
  local aside = find_dead_letter(base, id, 0)
  local number = aside and whole_number(string.match(aside, '%d+$'), 0, NEVER)
  local kept = aside and redis.call('HMGET', aside, 'parent', 'error_type', 'error_message', 'error_traceback', 'error_fields') or {}
  if aside and number > after and kept[1] == parent_field(parent) then
    tell_parent(base, id, kept[1], number, 'failed', packed_failure(kept[2], kept[3], kept[4], kept[5]))
    return true
  end
  return false
end

-- True if the job `id` has not ended and is a child of this parent.
local function is_child_of(base, id, from, parent, life)
  for _, key in ipairs({base .. ':active:' .. id, base .. ':job:' .. id}) do
    local found = parsed_parent(own(redis.pcall('HGET', key, 'parent')) or nil)
    if found and found.base == from and found.id == parent and found.life == life then
      return true
    end
  end
  return false
end

-- Returns the keys of the children for which the suspended record `key` waits, and that have not ended.
local function missing_children(key)
  local missing = {}
  for _, wait in ipairs(open_waits(redis.call('HGET', key, 'open') or nil)) do
    local kind, _, _, _, about = read_wait(key, wait)
    for child in string.gmatch((kind == 'children' or kind == 'first') and about or '', '[^\n]+') do
      missing[#missing + 1] = redis.call('HEXISTS', key, 'end:' .. child) == 0 and child or nil
    end
  end
  return missing
end

-- Asks the queues of the `missing` children of the suspended workflow `id` whether they have ended: the message of an end may have
-- been lost. It stays suspended until the next look, or until its first `deadline`.
local function look_for_children(base, id, missing, deadline, now)
  local job = base .. ':job:' .. id
  local life = redis.call('HGET', job, 'life') or ''
  for _, key in ipairs(missing) do
    local child = noted_child(redis.call('HGET', job, 'child:' .. key))
    if child then
      post(base, 'look ' .. child.id, {'look', child.base, id, life, key, digits(child.after), child.id})
    end
  end
  redis.call('ZADD', base .. ':suspended', digits(math.min(deadline, now + NEXT_LOOK)), id)
end

-- Drops the waits between the tries of a `step` from what a workflow keeps. Returns how many bytes they counted.
local function drop_pauses(kept, step)
  local pauses, size = {}, 0
  for name in pairs(kept) do
    local key = string.match(name, '^wait:(.*)$')
    if key and string.match(key, '^retry of (.*) #%d+$') == step then
      pauses[#pauses + 1] = key
    end
  end
  for _, key in ipairs(pauses) do
    size = size + delete_entry(kept, {kind = 'wait', key = key})
  end
  return size
end

-- Drops failures from what a put-back workflow keeps, if its runs have stored nothing after them: they are tried again. The ends of
-- children that were dropped do not count any more.
local function drop_last_failures(kept)
  local entries, size, dropped = whole_number(kept.entries, 0), whole_number(kept.saved_size, 0), {}
  for name, value in pairs(kept) do
    local key = string.match(name, '^end:(.*)$')
    local child = key and noted_child(kept['child:' .. key])
    local outcome, number, stored = string.match(child and value or '', '^(%l+) (%d+) (%d+) ')
    if outcome and outcome ~= 'finished' and outcome ~= 'large' and tonumber(stored) == entries then
      child.after, child.round = math.max(child.after, tonumber(number)), child.round + 1
      kept[name], kept['child:' .. key] = nil, child_field(child)
      if kept['at:child:' .. key] then -- a new key would disturb the loop, also without a value
        kept['at:child:' .. key] = string.match(kept['at:child:' .. key], '^%d+ %d+ ')
      end
      size = size - math.max(0, #value - STEP_BYTES)
      dropped[key] = true
    end
  end
  local races = {}
  for name, value in pairs(kept) do
    local key = string.match(name, '^end:(.*)$')
    local winner = key and string.match(value, '^value %d+ %d+ (.*)$')
    if winner and dropped[winner] and string.find(kept['wait:' .. key] or '', '^first ') then
      races[#races + 1] = key
    end
  end
  for _, key in ipairs(races) do -- a wait for the first of several children, which was one of these, begins anew
    size = size - delete_entry(kept, {kind = 'wait', key = key})
  end
  local failed_at, step = string.match(kept.last_failed or '', '^(%d+) (.*)$')
  if step and tonumber(failed_at) == entries and kept['step:' .. step] then
    size = size - saved_bytes(step, #kept['step:' .. step]) - drop_pauses(kept, step)
    kept['step:' .. step], kept['at:step:' .. step] = nil, nil
  end
  kept.saved_size = kept.saved_size and digits(math.max(0, size))
end

-- Returns the entries of a workflow from its record `kept`, the first one first: steps, waits, children, and steps of which tries have
-- failed (`try`). Each has its kind, its key and its number. Also returns the key of one of which no number is known, if there is one.
local function entries_of(kept)
  local entries, unordered = {}, nil
  for name in pairs(kept) do
    local kind, key = string.match(name, '^(%l+):(.+)$')
    local is_one = (kind == 'step' or kind == 'child' or kind == 'wait' or kind == 'try') and name ~= 'step:@errors'
    if is_one then
      local at = string.match(kept['at:' .. kind .. ':' .. key] or '', '^%d+')
      if not at and kind == 'wait' then -- an older version has stored it
        at = string.match(kept['end:' .. key] or '', '^%l+ %d+ (%d+) ')
      end
      if not at and (kind == 'wait' or kind == 'try') then
        at = kept.entries or '0'
      end
      local number = whole_number(at, nil, NEVER)
      entries[#entries + 1] = {kind = kind, key = key, number = (number or 0) + (kind == 'try' and 1 or 0)}
      unordered = unordered or not number and key
    end
  end
  table.sort(entries, function(one, other)
    return one.number < other.number or one.number == other.number and one.key < other.key
  end)
  return entries, unordered
end

-- Deletes an entry from what a workflow keeps. Returns how many bytes it counted.
local function delete_entry(kept, entry)
  local kind, key = entry.kind, entry.key
  local value, outcome, ended = kept[kind .. ':' .. key], string.match(kept['end:' .. key] or '', '^(%l+) %d+ %d+ (.*)$')
  kept[kind .. ':' .. key], kept['at:' .. kind .. ':' .. key] = nil, nil
  if kind == 'step' or kind == 'try' then
    return saved_bytes(key, #value)
  end
  local refused, size = kept['refused:' .. key], 0
  kept['end:' .. key], kept['refused:' .. key] = nil, nil
  if kind == 'child' then
    return STEP_BYTES + math.max(0, #(ended or '') - STEP_BYTES)
  end
  local what, _, _, event = parsed_wait(value)
  if ended then
    size = what == 'event' and outcome == 'value' and saved_bytes(event, #ended) or STEP_BYTES
  end
  return size + (refused and saved_bytes(event or '', #refused) or 0)
end

-- Returns which of these entries go if a workflow runs again from `key`, by kind and key: it, and those after it. The waits between the
-- tries of a step go with the step. Returns nil if there is no such entry.
local function entries_from(entries, key)
  local from, going, found = nil, {}, false
  for _, entry in ipairs(entries) do
    from = from or entry.key == key and entry.number
  end
  for _, entry in ipairs(from and entries or {}) do
    going[entry.kind .. ':' .. entry.key] = (entry.key == key or entry.number > from) or nil
  end
  for _, entry in ipairs(from and entries or {}) do
    local step = entry.kind == 'wait' and string.match(entry.key, '^retry of (.*) #%d+$')
    if step and (going['step:' .. step] or going['try:' .. step]) then
      going['wait:' .. entry.key] = true
    end
    found = true
  end
  return found and going or nil
end

-- Drops the entry `key`, and all later ones, from the record `fields` of a workflow. Returns the fields that are left, how many entries
-- were dropped, and the children among them that have not ended. Returns nil and the reply if that is not possible.
local function drop_entries(fields, key)
  local entries, unordered = entries_of(fields)
  local going, left, open, running, dropped = entries_from(entries, key), {}, {}, {}, 0
  if not going then
    local reply = {'unknown'}
    for i = 1, math.min(#entries, 100) do
      reply[i + 1] = entries[i].key
    end
    return nil, reply
  elseif unordered then
    return nil, {'unordered', unordered}
  end
  for name, value in pairs(fields) do
    left[name] = value
  end
  local size = whole_number(fields.saved_size, 0)
  for _, entry in ipairs(entries) do
    if going[entry.kind .. ':' .. entry.key] then
      local child = entry.kind == 'child' and not fields['end:' .. entry.key] and noted_child(fields['child:' .. entry.key])
      running[#running + 1] = child or nil
      size, dropped = size - delete_entry(left, entry), dropped + 1
    end
  end
  for _, name in ipairs(open_waits(fields.open)) do
    open[#open + 1] = left['wait:' .. name] and name or nil
  end
  left.open = #open > 0 and cmsgpack.pack(open) or nil
  local failed = string.match(fields.last_failed or '', '^%d+ (.*)$')
  left.last_failed = failed and left['step:' .. failed] and fields.last_failed or nil
  left.saved_size = fields.saved_size and digits(math.max(0, size))
  left.rewinds = digits(whole_number(fields.rewinds, 0) + 1)
  return left, dropped, running
end

-- note_children: notes in the record of a run which jobs it is about to start, so that their ends are stored there. It dispatches them
-- then, unless they have ended: also those that an earlier run has noted, in the queue that was noted.
-- ARGV[1] worker id
-- ARGV[2] claim id
-- ARGV[3..] keys key of the child, base of its queue, and its id, in turn; 1 to 1,000 children
-- RETURNS ok entry... (of each child: the `after` of its dispatch, the base of its queue, and how it has ended, or false) | full (the
--   job keeps too much: nothing is noted) | lost
-- RESEND safe: fenced by the claim; a child that is noted stays as it is
-- FLAGS allow-oom
local function note_children()
  local queue = KEYS[1]
  local worker, claim = ARGV[1], ARGV[2]
  local claims = queue .. ':claims:' .. worker

  local item = redis.call('SISMEMBER', claims, claim) == 1 and own(redis.pcall('LINDEX', queue .. ':claim:' .. claim, 0))
  local task = item and claimed_task(queue, item, job_id(item), claim, {task = item})
  local active = task and queue .. ':active:' .. task.id
  if not task or task.job and own(redis.pcall('HGET', active, 'claim')) ~= claim then
    return {'lost'}
  end
  local kept = task.job and redis.call('HMGET', active, 'first', 'saved_size') or {}
  local reply, new, times, size = {'ok'}, {}, {}, whole_number(kept[2], 0)
  for i = 3, #ARGV, 3 do
    local key, base, id = ARGV[i], ARGV[i + 1], ARGV[i + 2]
    if not (is_line(key) and is_line(base) and string.find(base, '{', 1, true) and is_line(id)) or #reply > MOST_CHILDREN then
      return redis.error_reply('ERR 1 to 1000 children, each with a key, the base of a queue and an id, of one line')
    end
    local child = noted_child(task.job and redis.call('HGET', active, 'child:' .. key) or nil)
    if not child then
      child, size = {after = 0, round = 0, base = base, id = id}, size + STEP_BYTES
      new['child:' .. key] = child_field(child)
    end
    reply[#reply + 1] = {digits(child.after), child.base, task.job and redis.call('HGET', active, 'end:' .. key) or false}
  end
  if next(new) and size > MOST_KEPT then
    return {'full'}
  elseif not task.job then
    become_job(queue, worker, claim, task)
  end
  redis.call('HSETNX', active, 'life', kept[1] or claim)
  if next(new) then
    new.saved_size = digits(size)
    local entry, now = note_entry(queue, worker, active, false), now_ms()
    for name in pairs(new) do
      times['at:' .. name] = string.find(name, '^child:') and time_of_entry(entry, now) or nil
    end
    write_hash(active, new)
    write_hash(active, times)
  end
  return reply
end

-- store_end: stores in the record of a workflow how a child of it has ended, and wakes the workflow if it waits for nothing else. Wherever
-- the record is: also in the dead-letter queue. An end that is not above the `after` of the child, or a second one, changes nothing. If the
-- parent is there because of a failed one, a later end takes its place.
-- ARGV[1] from base of the child's queue, which must be the one that the parent has noted
-- ARGV[2] id of the parent
-- ARGV[3] life of the parent
-- ARGV[4] key of the child
-- ARGV[5] number of the end
-- ARGV[6] outcome finished, failed, cancelled, large or gone
-- ARGV[7] value the encoded result, how it failed (msgpack), the reason, or the size
-- RETURNS ok
-- RESEND safe: the first end counts
-- FLAGS allow-oom
local function store_end()
  local queue = KEYS[1]
  local from, id, life, key, number = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local outcome, value = ARGV[6], ARGV[7]

  check_types(queue)
  local fact = {number = whole_number(number, 0, NEVER), outcome = string.match(outcome, '^%l+$') or 'gone', value = value}
  wake(queue, take_end(queue, from, {id = id, life = life, key = key}, fact, now_ms()))
  return {'ok'}
end

-- cancel_child: cancels a child, because its parent was cancelled. If there is no such child, one that is dispatched later does not
-- start.
-- ARGV[1] from base of the parent's queue
-- ARGV[2] parent id
-- ARGV[3] life of the parent
-- ARGV[4] id of the child
-- ARGV[5] reason text
-- RETURNS ok
-- RESEND safe: a copy finds the child cancelled
-- GROUP seldom
-- FLAGS allow-oom
local function cancel_child()
  local queue = KEYS[1]
  local from, parent, life, id, reason = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local ended = queue .. ':ended:' .. id

  check_types(queue)
  if is_child_of(queue, id, from, parent, life) then
    cancel_by_id(queue, id, reason)
    wake(queue, count_members(queue))
    give_room(queue)
  elseif redis.call('EXISTS', ended) == 0 then
    local token = next_token(queue)
    store_token(queue, token)
    local message = {'ended', from, parent, life, '', digits(token), 'cancelled', reason}
    redis.call('SET', ended, cmsgpack.pack(message), 'PX', CHILD_EXPIRE)
  end
  return {'ok'}
end

-- look_for_child: tells a workflow that waits for a child how it has ended, if that message was lost. A child of which nothing is
-- stored has been lost, and counts as `gone`.
-- ARGV[1] from base of the parent's queue
-- ARGV[2] parent id
-- ARGV[3] life of the parent
-- ARGV[4] key of the child
-- ARGV[5] after number above which an end counts
-- ARGV[6] id of the child
-- RETURNS ok
-- RESEND safe: the parent takes the first end
-- FLAGS allow-oom
local function look_for_child()
  local queue = KEYS[1]
  local from, parent, life, key = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
  local after, id = tonumber(ARGV[5]), ARGV[6]

  check_types(queue)
  local asks = {base = from, id = parent, life = life, key = key}
  if is_child_of(queue, id, from, parent, life) or repeats_end(queue, id, asks, after) then
    return {'ok'}
  end
  local token = next_token(queue)
  store_token(queue, token)
  tell_parent(queue, id, parent_field(asks), token, 'gone', '')
  return {'ok'}
end
