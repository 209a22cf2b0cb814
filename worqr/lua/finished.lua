-- Kept jobs: what stays of a job after its end, how that is bounded, and the tags by which jobs are found in any state.

-- A record with a field `done`, the text JOBS MS BYTES, is kept at its end: `done:NUMBER` has what people look at, by the number of
-- the dispatch that created the job, so that an id that is used again overwrites nothing. It is one packed list, because a hash
-- costs three times its memory and twice its time: KEPT_FIELDS, then KEPT_FACTS, then what store_result stores of the end. The set
-- `done` has an entry NUMBER SIZE for each, by the time of the end, with a + behind it if the job can be found by an id or tags. A
-- record expires by itself after MS; its entry is removed when it is reached. An end removes the oldest until no more than JOBS
-- are kept, with no more than BYTES, at most MOST_TRIMMED at once.
-- JOBS of 0 keeps nothing. The run of a schedule whose record has no field `done` is kept by OF_SCHEDULE, in the set `done_fired`, which
-- has its own bounds: it takes no place among the jobs that the application asked to keep, nor they one in it.
-- A job is found by an id that worqr has generated, which begins with the number, or by `done_id:ID`, which has the newest.
-- A record with a field `tags`, names with line breaks between them, has an entry NUMBER ID in the set `tag:NAME` for each, by
-- number. An entry is a hint: a reader looks at the record's own `tags`. So an entry that no script has removed costs
-- memory until the set expires, and never a wrong reply. A set with MOST_TAGGED entries takes no more, and notes this in the entry
-- MISSING: then nothing may act on the tag, because it would not reach all jobs.
-- `tag_marks` has the tags that are being cancelled: a number, a space and the reason. What was dispatched up to that number is
-- cancelled when a worker reaches it.

local MOST_TRIMMED = 100
local OF_SCHEDULE = '20 34560000000 67108864 fired' -- the last 20 of a queue, for 400 days as their outcomes
local KEEP_NOTHING = '0 1 1'
local MOST_TAGS = 8
local TAG_BYTES = 100
local MOST_TAGGED = 100000
local MISSING = '-'
local TAGS_EXPIRE = 2592000000 -- ms, 30 days after the last job with this tag, at least
local MARKS_EXPIRE = 2592000 -- s: the same
local KEPT_BYTES = 330 -- of memory that a kept job takes beside its record and the name of its queue
local FILED_BYTES = 200 -- that an id or a tag takes beside the names in it
local HOUR_MS = 3600000 -- by which an expiry is set too late, so that it is not set again at each end
local KEPT_FIELDS = {'task', 'meta', 'lane', 'run_at', 'claim', 'worker', 'failures', 'stalls', 'timeouts', 'progress', 'message', 'tries'}
local ENDED = {'job_ended', 'batch_ended'} -- fields of a follow-up: what has ended
local NEEDED = {'job_ended', 'batch_ended', 'life', 'lifetime'} -- by a run again, of a follow-up or of a workflow
local KEPT_FACTS = {'first', 'last', 'done', 'tags', 'id', 'outcome', 'ended', 'attempts', 'cut'}

-- Returns the names in a field `tags`, at most MOST_TAGS.
local function tag_names(tags)
  local names = {}
  for name in string.gmatch(tags or '', '[^\n]+') do
    names[#names + 1] = #names < MOST_TAGS and name or nil
  end
  return names
end

-- True if the field `tags` has the tag `name`.
local function has_tag(tags, name)
  return string.find('\n' .. (tags or '') .. '\n', '\n' .. name .. '\n', 1, true) ~= nil
end

-- Returns the three bounds by which an end is kept; nil if another program has written something else into the field `done`.
local function kept_bounds(done)
  local jobs, ms, bytes = string.match(done or '', '^(%d+) (%d+) (%d+)$')
  if done == OF_SCHEDULE then
    jobs, ms, bytes = string.match(done, '^(%d+) (%d+) (%d+)')
  end
  jobs, ms, bytes = whole_number(jobs), whole_number(ms), whole_number(bytes)
  if jobs and ms and bytes and ms > 0 then
    return jobs, ms, bytes
  end
  return nil
end

-- Returns the bounds by which an end is kept: `done` of the record, or those of runs of schedules; nil if nothing is kept.
local function bounds_of_end(done, is_firing)
  done = done or is_firing and OF_SCHEDULE or '0 '
  return string.sub(done, 1, 2) ~= '0 ' and done or nil
end

-- Returns the set that lists a job that is kept by the bounds `done`.
local function set_of_kept(base, done)
  return base .. (done == OF_SCHEDULE and ':done_fired' or ':done')
end

-- True if the value can be the option `tags` of a dispatch: 1 to MOST_TAGS names with line breaks between them.
local function are_tags(value)
  if type(value) ~= 'string' or not is_utf8(value) then
    return false
  end
  local n = 0
  for name in string.gmatch(value .. '\n', '(.-)\n') do
    n = n + 1
    if n > MOST_TAGS or #name < 1 or #name > TAG_BYTES or string.find(name, '%c') then
      return false
    end
  end
  return true
end

-- Adds the dispatch `number` of the job `id` to the sets of its `tags`. `done`: its field (nil: it is not kept). `delay`: ms until
-- it is due.
local function add_tags(base, tags, number, id, done, delay)
  local _, kept_ms = kept_bounds(done)
  local ms = math.max(TAGS_EXPIRE, kept_ms or 0) + clamp(delay, 0, LATEST)
  for _, name in ipairs(whole_number(number, nil, NEVER) and tag_names(tags) or {}) do
    local key = base .. ':tag:' .. name
    local entries = own(redis.pcall('ZCARD', key))
    if entries and entries >= MOST_TAGGED then
      entries = entries - drop_stale_entries(base, name)
    end
    if entries then
      redis.call('ZADD', key, number, entries < MOST_TAGGED and number .. ' ' .. id or MISSING)
      if redis.call('PTTL', key) < ms then
        redis.call('PEXPIRE', key, digits(ms + HOUR_MS))
      end
    end
  end
end

-- Removes the dispatch `number` of the job `id` from the sets of its `tags`.
local function remove_tags(base, tags, number, id)
  for _, name in ipairs(tag_names(tags)) do
    own(redis.pcall('ZREM', base .. ':tag:' .. name, number .. ' ' .. id))
  end
end

-- Files the record of the job `id` anew: `old` is what it had, `new` has the fields done and tags that it gets.
local function change_tags(base, id, old, new, delay)
  remove_tags(base, old.tags, old.first or '0', id)
  add_tags(base, new.tags, old.first or '0', id, new.done, delay)
end

-- Returns the bytes of memory that a kept job counts: its `packed` record, and what finds it. The server's allocator rounds up by
-- at most a quarter.
local function kept_size(base, packed, id, tags)
  local size = KEPT_BYTES + #base + math.ceil(#packed * 1.25)
  if string.sub(id, 1, 1) ~= '@' then
    size = size + FILED_BYTES + #base + #id
  end
  return tags and size + #tag_names(tags) * (FILED_BYTES + #id) or size
end

-- Returns the entry of a kept job in the set.
local function kept_entry(number, size, id, tags)
  return number .. ' ' .. size .. ((tags or string.sub(id, 1, 1) ~= '@') and ' +' or '')
end

-- Returns the kept record of the dispatch `number` as a table, with its `size` and its `entry`; nil if there is none, or if another
-- program has written something else.
local function read_kept(base, number)
  local packed = own(redis.pcall('GET', base .. ':done:' .. number))
  local is_read, values = pcall(cmsgpack.unpack, packed or '')
  if not packed or not is_read or type(values) ~= 'table' then
    return nil
  end
  local record, n = {}, #KEPT_FIELDS
  for i, name in ipairs(KEPT_FIELDS) do
    record[name] = type(values[i]) == 'string' and values[i] or nil
  end
  for i, name in ipairs(KEPT_FACTS) do
    record[name] = type(values[n + i]) == 'string' and values[n + i] or nil
  end
  local facts = values[n + #KEPT_FACTS + 1]
  for i = 1, type(facts) == 'table' and #facts or 0, 2 do
    local name, value = facts[i], facts[i + 1]
    if type(name) == 'string' and type(value) == 'string' and value ~= '' and not record[name] then
      record[name] = value
    end
  end
  if record.first ~= number or not record.id or not record.outcome then
    return nil
  end
  local size = kept_size(base, packed, record.id, record.tags)
  record.size, record.entry = digits(size), kept_entry(number, size, record.id, record.tags)
  return record
end

-- Returns the values of fields of a record, false for each that is missing, as HMGET does. `record`: its key, or what read_kept
-- has returned.
local function record_fields(record, ...)
  if type(record) == 'string' then
    return own(redis.pcall('HMGET', record, ...)) or {}
  end
  local values = {}
  for i, name in ipairs({...}) do
    values[i] = record[name] or false
  end
  return values
end

-- Deletes the kept records of the first `n` of `entries`, at most 1000, whose places in the set are gone already. Returns the bytes
-- that they counted.
local function forget_kept(base, entries, n)
  local keys, freed = {}, 0
  for i = 1, n do
    local number, size, filed = string.match(entries[i], '^(%d+) (%d+)( ?%+?)$')
    local kept = number and filed ~= '' and read_kept(base, number)
    if kept and own(redis.pcall('GET', base .. ':done_id:' .. kept.id)) == number then
      redis.call('DEL', base .. ':done_id:' .. kept.id)
    end
    if kept then
      remove_tags(base, kept.tags, number, kept.id)
    end
    keys[#keys + 1], freed = number and base .. ':done:' .. number, freed + whole_number(size, 0)
  end
  if keys[1] then
    redis.call('DEL', unpack(keys, 1, math.min(#keys, 1000)))
  end
  return freed
end

-- Adds `bytes`, which may be negative, to what kept jobs take. Returns the sum.
local function add_kept_bytes(base, bytes)
  if not own(redis.pcall('HLEN', base .. ':done_total')) then
    return 0
  end
  local sum = add_to(base .. ':done_total', 'bytes', bytes)
  if bytes < 0 and (sum < 0 or redis.call('EXISTS', base .. ':done') == 0) then
    redis.call('DEL', base .. ':done_total')
  end
  return sum
end

-- Removes the oldest kept jobs until there are no more than `jobs`, with no more than `bytes` of `total`; at most `most`.
local function trim_kept_jobs(base, jobs, bytes, total, most)
  local done, n, freed = base .. ':done', 0, 0
  local over, excess = math.min(most, redis.call('ZCARD', done) - jobs), total - bytes
  if over <= 0 and excess <= 0 then
    return
  end
  local oldest = redis.call('ZRANGE', done, 0, (excess > 0 and most or over) - 1)
  while n < #oldest and (n < over or freed < excess) do
    n = n + 1
    freed = freed + whole_number(string.match(oldest[n], '^%d+ (%d+)'), 0)
  end
  redis.call('ZPOPMIN', done, n)
  forget_kept(base, oldest, n)
  add_kept_bytes(base, -freed)
end

-- The jobs that this script keeps: time, entry, size, and the bounds of each, in turn. The field `fired` has the same of runs of schedules.
local kept_changes = {}

-- Adds `changes`, which are like kept_changes, to the set `done`, and removes them from the table. Returns the sum of their sizes.
local function list_in(done, changes)
  local sum = 0
  for from = 1, #changes, 400 do
    local pairs_of = {}
    for i = from, math.min(from + 399, #changes), 4 do
      pairs_of[#pairs_of + 1], pairs_of[#pairs_of + 2] = changes[i], changes[i + 1]
      sum = sum + changes[i + 2]
    end
    redis.call('ZADD', done, unpack(pairs_of))
  end
  for i = #changes, 1, -1 do
    changes[i] = nil
  end
  return sum
end

-- Returns the bytes that the `n` kept runs of schedules count.
local function fired_bytes(base, n)
  local sum = 0
  for _, entry in ipairs(n > 0 and redis.call('ZRANGE', base .. ':done_fired', 0, 1999) or {}) do
    sum = sum + whole_number(string.match(entry, '^%d+ (%d+)'), 0)
  end
  return sum
end

-- Lists the runs of schedules that this script keeps, and removes the oldest. The set is small: it is read as a whole.
local function list_fired_changes(base)
  local done, n, fired_changes = base .. ':done_fired', 0, kept_changes.fired
  kept_changes.fired = nil
  if not permitted(redis.pcall('ZCARD', done)) then
    local unlisted = {}
    for i = 2, #fired_changes, 4 do
      unlisted[#unlisted + 1] = fired_changes[i]
    end
    forget_kept(base, unlisted, #unlisted)
    return
  end
  list_in(done, fired_changes)
  local jobs, ms, bytes = kept_bounds(OF_SCHEDULE)
  local entries, sum = redis.call('ZRANGE', done, 0, 1999), fired_bytes(base, 1)
  while n < #entries and n < 1000 and (#entries - n > jobs or sum > bytes) do
    n = n + 1
    sum = sum - whole_number(string.match(entries[n], '^%d+ (%d+)'), 0)
  end
  if n > 0 then
    redis.call('ZPOPMIN', done, n)
    forget_kept(base, entries, n)
  end
  redis.call('PEXPIRE', done, digits(ms + HOUR_MS))
end

-- Lists the jobs that this script keeps, and removes the oldest, at most MOST_TRIMMED, or as many as it keeps. count_members calls it
-- at the end of each script that ends jobs: once for all of them, because commands take most of a script's time.
local function list_kept_changes(base)
  local done, n = base .. ':done', #kept_changes / 4
  local jobs, ms, bytes = kept_bounds(kept_changes[#kept_changes])
  if not own(redis.pcall('ZCARD', done)) then
    return
  end
  local sum = list_in(done, kept_changes)
  trim_kept_jobs(base, jobs, bytes, add_kept_bytes(base, sum), math.max(MOST_TRIMMED, n))
  if redis.call('PTTL', done) < ms then
    redis.call('PEXPIRE', done, digits(ms + HOUR_MS))
    redis.call('PEXPIRE', base .. ':done_total', digits(ms + HOUR_MS))
  end
end

-- Returns `facts` with the fields NEEDED of a job, whose values are in the table `fields`.
local function with_needed(facts, fields)
  local more = {unpack(facts)}
  for _, name in ipairs(NEEDED) do
    if fields[name] then
      more[#more + 1], more[#more + 2] = name, fields[name]
    end
  end
  return more
end

-- Returns what is packed of a job that has ended, without its payload, result, traceback and tries.
local function without_large(values, facts)
  local small, large = {}, {value = true, error_traceback = true, job_ended = true, batch_ended = true}
  for i = 1, #facts, 2 do
    if not large[facts[i]] then
      small[#small + 1], small[#small + 2] = facts[i], facts[i + 1]
    end
  end
  values[1], values[12], values[21], values[22] = false, false, '1', small
  return cmsgpack.pack(values)
end

-- Keeps a job that has ended. `values`: KEPT_FIELDS of its record, false for each that is missing. `kept`: first, last, done and tags
-- of it. `facts`: as for store_result. `uncounted`: the attempts that its counters do not count. Of a record above a tenth of the
-- bytes that all may take, payload, result, traceback and tries are dropped, and it says so.
local function keep_job(base, id, values, kept, outcome, facts, uncounted)
  local first, tags = kept.first or '', kept.tags or false
  if kept_changes.done ~= kept.done then -- most jobs of a script have the same bounds
    local _, ms, bytes = kept_bounds(kept.done)
    kept_changes.done, kept_changes.ms, kept_changes.bytes = kept.done, ms and digits(ms), bytes
  end
  if not kept_changes.ms or not string.find(first, '^%d+$') then
    return remove_tags(base, kept.tags, first, id)
  end
  local changes, attempts = kept_changes, uncounted
  if kept.done == OF_SCHEDULE then
    kept_changes.fired = kept_changes.fired or {}
    changes = kept_changes.fired
  end
  local ended = changes[1] or digits(now_ms())
  if values[7] or values[8] or values[9] then
    attempts = whole_number(values[7], 0) + whole_number(values[8], 0) + whole_number(values[9], 0) + uncounted
  end
  values[13], values[14], values[15], values[16], values[17] = first, kept.last or false, kept.done, tags, id
  values[18], values[19], values[20], values[21], values[22] = outcome, ended, attempts .. '', false, facts
  local packed = cmsgpack.pack(values)
  local size = kept_size(base, packed, id, tags)
  if size > kept_changes.bytes / 10 then
    packed = without_large(values, facts)
    size = kept_size(base, packed, id, tags)
  end
  redis.call('SET', base .. ':done:' .. first, packed, 'PX', kept_changes.ms)
  if string.sub(id, 1, 1) ~= '@' then
    redis.call('SET', base .. ':done_id:' .. id, first, 'PX', kept_changes.ms)
  end
  local n = #changes
  changes[n + 1], changes[n + 2], changes[n + 3], changes[n + 4] = ended, kept_entry(first, size, id, tags), size, kept.done
end

-- What the end of a job means for what is kept of it, and for its tags. `key`: its record. `kept`: first, last, done and tags, fields
-- of the record; is_firing, true for the run of a schedule; uncounted, as in keep_job; result, the key of its result (false: none). The
-- job stays in the sets of its tags as long as something of it is stored.
local function note_end(base, id, key, kept, outcome, facts)
  if kept.result and kept.tags then
    redis.call('HSET', kept.result, 'tags', kept.tags)
  end
  kept.done = bounds_of_end(kept.done, kept.is_firing)
  if not kept.done or outcome == 'gone' then
    return not kept.result and remove_tags(base, kept.tags, kept.first or '', id)
  end
  local values = own(redis.pcall('HMGET', key, 'life', 'lifetime', unpack(KEPT_FIELDS)))
  if values then
    local life, lifetime = table.remove(values, 1), table.remove(values, 1)
    local is_follow_up = string.find(id, '^@.+%.')
    if life or is_follow_up then
      local ended = is_follow_up and redis.call('HMGET', key, unpack(ENDED)) or {}
      facts = with_needed(facts, {life = life, lifetime = lifetime, job_ended = ended[1], batch_ended = ended[2]})
    end
    keep_job(base, id, values, kept, outcome, facts, kept.uncounted)
  end
end

-- Returns the kept record of the job `id`, dispatch `number` (0: the newest), and how it ended; nil if there is none.
-- An earlier dispatch of an id is found by the number that created its job.
local function find_kept(base, id, number)
  local newest = string.match(id, '^@(%d+)') or own(redis.pcall('GET', base .. ':done_id:' .. id))
  for _, first in ipairs({number > 0 and digits(number) or newest or '0', newest or nil}) do
    local kept = read_kept(base, first)
    if kept and kept.id == id and covers(number, kept.first, kept.last) then
      return kept, kept.outcome
    end
  end
  return nil
end

-- Returns the record of an entry of a tag, if it has the tag: its key, or what read_kept returns; its state and its newest dispatch.
-- `live`: look only for a job that has not ended. The state `trashed` is that of a job of a deleted queue. An entry that has
-- none of these is stale.
local function find_tagged(base, entry, tag, live)
  local number, id = string.match(entry, '^(%d+) (.+)$')
  for _, kind in ipairs(number and {':active:', ':job:'} or {}) do
    local key = base .. kind .. id
    local kept = own(redis.pcall('HMGET', key, 'first', 'tags', 'state', 'last', 'queued')) or {}
    if kept[1] == number and has_tag(kept[2], tag) then
      local trashed = kind == ':job:' and whole_number(kept[5], NEVER, NEVER) <= cleared_up_to(base)
      if trashed and live then
        return nil
      end
      return key, trashed and 'trashed' or kept[3], kept[4]
    end
  end
  if live or not number then
    return nil
  end
  local aside = find_dead_letter(base, id, 0, number)
  if aside and has_tag(redis.call('HGET', aside, 'tags'), tag) then
    return aside, 'failed', number
  end
  local found = read_kept(base, number)
  if found and found.id == id and has_tag(found.tags, tag) then
    return found, found.outcome, number
  end
  for _, key in ipairs({base .. ':result:' .. id, base .. ':older_result:' .. id}) do
    local kept = own(redis.pcall('HMGET', key, 'first', 'tags', 'outcome')) or {}
    if kept[1] == number and has_tag(kept[2], tag) then
      return key, kept[3], number
    end
  end
  return nil
end

-- Removes stale entries from the earlier end of a full set, at most 100. Returns how many.
local function drop_stale_entries(base, tag)
  local stale = {}
  for _, entry in ipairs(redis.call('ZRANGE', base .. ':tag:' .. tag, 0, 99)) do
    if entry ~= MISSING and find_tagged(base, entry, tag, false) then
      break
    end
    stale[#stale + 1] = entry ~= MISSING and entry or nil
  end
  return #stale > 0 and redis.call('ZREM', base .. ':tag:' .. tag, unpack(stale, 1, math.min(#stale, 100))) or 0
end

-- True if a job with these `tags`, whose newest dispatch is `last`, belongs to a tag that is being cancelled; and why it is.
local function is_tag_cancelled(base, tags, last)
  local names = tag_names(tags)
  local marks = #names > 0 and own(redis.pcall('HMGET', base .. ':tag_marks', unpack(names))) or {}
  for i = 1, #names do
    local number, why = string.match(marks[i] or '', '^(%d+) (.*)$')
    if number and whole_number(last, NEVER, NEVER) <= tonumber(number) then
      return true, why
    end
  end
  return false
end

-- Cancels the job `id`, whose reference a start has reached, if one of its `tags` is being cancelled. Returns true if so. The
-- start then skips the reference, as that of any job that was cancelled. `of_lane`: the lane that has it (nil: none). `lane`: that
-- of a suspect, which has its place there.
local function cancel_reached(start, id, tags, last, of_lane, lane)
  local base = start.base
  if start.has_marks == nil then
    start.has_marks = redis.call('EXISTS', base .. ':tag_marks') == 1
  end
  local is_cancelled, why = false, nil
  if start.has_marks then
    is_cancelled, why = is_tag_cancelled(base, tags, last)
  end
  if is_cancelled then
    delete_cancelled_job(base, id, longest_result_ttl(base), why)
    count(base, 'cancelled', 1, {id})
    add_stale(base, 1) -- which the start takes back for each reference that it skips, as the next
    if of_lane then
      add_gone(base, of_lane, 1)
    end
    if lane then
      free_places(base, {':' .. id}, start.now)
    end
  end
  return is_cancelled
end

-- True if the set of a tag does not have all of its jobs; and its entry MISSING. No set has jobs that were dispatched before
-- TAGS_EXPIRE.
local function is_incomplete(base, tag)
  local missing = own(redis.pcall('ZSCORE', base .. ':tag:' .. tag, MISSING))
  return missing and tonumber(missing) / 1000 >= now_ms() - TAGS_EXPIRE, missing
end

-- Returns a page of the entries of a tag, those of the earliest dispatches first, after the number `after` and up to `last`; and
-- whether the tag has too many jobs to act on.
local function tag_page(base, tag, after, last, limit)
  local key = base .. ':tag:' .. tag
  local incomplete, missing = is_incomplete(base, tag)
  if incomplete then
    return {}, true
  elseif missing then
    redis.call('ZREM', key, MISSING)
  end
  return own(redis.pcall('ZRANGE', key, '(' .. after, last, 'BYSCORE', 'LIMIT', 0, limit)) or {}, false
end

-- Removes entries of a tag that stand for no job with this tag any more.
local function repair_tag(base, tag, entries)
  if #entries > 0 then
    redis.call('ZREM', base .. ':tag:' .. tag, unpack(entries, 1, math.min(#entries, 100)))
  end
end

-- cancel_tagged: cancels the jobs of a tag in steps, in the order of their dispatches: those that do not run are deleted, those
-- that run are marked and their workers notified. The first step marks the tag with a number: no job that was dispatched up to it
-- starts any more, whatever happens to the other steps. A later dispatch is not cancelled.
-- ARGV[4] tag name
-- ARGV[5] after where the last step ended: the mark, a space and a number; - at first
-- ARGV[6] budget jobs to look at in one call
-- ARGV[7] reason text for callers that wait for a result
-- RETURNS ok waiting running after claim... | more (the same; call again with after) | large (nothing was changed) | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function cancel_tagged()
  local queue = KEYS[1]
  local tag, after, budget, reason = ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]
  local marks = queue .. ':tag_marks'

  check_types(queue)
  redis.call('HLEN', marks)
  local ttl, mark, behind = longest_result_ttl(queue), string.match(after, '^(%d+) (%d+)$')
  if not mark then
    mark, behind = digits(next_token(queue)), '0'
  end
  local page, too_large = tag_page(queue, tag, behind, mark, budget)
  if too_large then
    return {'large'}
  end
  if after == '-' then
    store_token(queue, tonumber(mark))
    redis.call('HSET', marks, tag, mark .. ' ' .. reason)
    redis.call('EXPIRE', marks, MARKS_EXPIRE)
  end
  local reply, ids, marked, gone = {'more', 0, 0, after}, {}, {}, {}
  for _, entry in ipairs(page) do
    local key, state, last = find_tagged(queue, entry, tag, true)
    local id = string.match(entry, ' (.+)$')
    behind = string.match(entry, '^%d+') or behind
    if key and whole_number(last, NEVER, NEVER) <= tonumber(mark) then
      if state == 'active' then
        local claim, worker = store_cancel_reason(queue, id, reason)
        marked[#marked + 1], marked[#marked + 2], reply[#reply + 1] = claim, worker, claim
      elseif cancel_queued(queue, id, ttl, reason) == 1 then
        ids[#ids + 1] = id
      end
    elseif not key and redis.call('EXISTS', queue .. ':done:' .. (string.match(entry, '^%d+') or '')) == 0
      and not find_tagged(queue, entry, tag, false) then
      gone[#gone + 1] = entry
    end
  end
  repair_tag(queue, tag, gone)
  if #page < budget then
    reply[1] = 'ok'
    if string.match(redis.call('HGET', marks, tag) or '', '^%d+') == mark then -- the pages have reached all that it stood for
      redis.call('HDEL', marks, tag)
    end
  end
  request_cancels(queue, marked)
  count(queue, 'cancelled', #ids, ids)
  wake(queue, count_members(queue))
  give_room(queue)
  reply[2], reply[3], reply[4] = #ids, #marked / 2, mark .. ' ' .. behind
  return reply
end

-- Forgets the results of the job `id` that belong to the dispatch `number`. Returns how many there were.
local function forget_results(base, id, number)
  local n = 0
  for _, kind in ipairs({':result:', ':older_result:'}) do
    if own(redis.pcall('HGET', base .. kind .. id, 'first')) == number then
      n = n + redis.call('DEL', base .. kind .. id)
    end
  end
  return n
end

-- Forgets the dead letters of the job `id` of the dispatch `number`, at most 100. Returns how many there were.
local function forget_dead_letters(base, id, number)
  for n = 0, 99 do
    local aside = find_dead_letter(base, id, 0, number)
    if not aside then
      return n
    end
    local claim = string.match(aside, '%d+$')
    redis.call('ZREM', base .. ':failed', claim)
    redis.call('ZREM', base .. ':broken', claim)
    delete_dead_letter(base, claim)
  end
  return 100
end

-- Removes the kept record of the dispatch `number`. Returns 1, or 0 if there is none.
local function drop_kept_job(base, number)
  local kept = number ~= '' and read_kept(base, number)
  if not kept or own(redis.pcall('ZREM', set_of_kept(base, kept.done), kept.entry)) ~= 1 then
    return 0
  end
  local freed = forget_kept(base, {kept.entry}, 1)
  if kept.done ~= OF_SCHEDULE then
    add_kept_bytes(base, -freed)
  end
  return 1
end

local FORGOTTEN_BYTES = 4194304 -- of kept records, after which one call ends: it reads each of them as a whole

-- forget_tagged: deletes all that is stored of the jobs of a tag, in steps: jobs that do not run, with what they have saved, kept
-- jobs, results and dead letters. A run is cancelled, and nothing is kept at its end.
-- ARGV[4] tag name
-- ARGV[5] last number up to which dispatches are forgotten; 0 at first
-- ARGV[6] budget jobs to look at in one call
-- ARGV[7] reason text for callers that wait for a result
-- RETURNS ok last waiting running kept results dead | more (the same; call again with last) | large | late: the last five are numbers of
--   what was deleted
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function forget_tagged()
  local queue = KEYS[1]
  local tag, last, budget, reason = ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]

  check_types(queue)
  local token = last == '0' and next_token(queue)
  last = token and digits(token) or last
  local page, too_large = tag_page(queue, tag, '0', last, budget)
  if too_large then
    return {'large'}
  elseif token then
    store_token(queue, token)
  end
  local reply, ids, marked, bytes, looked = {'more', last, 0, 0, 0, 0, 0}, {}, {}, 0, 0
  while looked < #page and bytes < FORGOTTEN_BYTES do
    looked = looked + 1
    local entry = page[looked]
    local number, id = string.match(entry, '^(%d+) (.+)$')
    local key, state = find_tagged(queue, entry, tag, false)
    bytes = bytes + (type(key) == 'table' and whole_number(key.size, 0) or 0)
    local is_live = key == queue .. ':active:' .. (id or '') or key == queue .. ':job:' .. (id or '')
    if is_live then
      remove_tags(queue, redis.call('HGET', key, 'tags'), number, id)
      redis.call('HDEL', key, 'done', 'keep', 'tags')
      redis.call('HSET', key, 'result_ttl', '0')
      if string.sub(id, 1, 5) == FIRING then
        redis.call('HSET', key, 'done', KEEP_NOTHING)
      end
    end
    if state == 'active' then
      marked[#marked + 1], marked[#marked + 2] = store_cancel_reason(queue, id, reason)
    elseif is_live and cancel_queued(queue, id, 0, reason) == 1 then -- a later job may have the id of one that has ended
      ids[#ids + 1] = id
    end
    if key then
      reply[5] = reply[5] + drop_kept_job(queue, number)
      reply[6] = reply[6] + forget_results(queue, id, number)
      reply[7] = reply[7] + forget_dead_letters(queue, id, number)
    end
    redis.call('ZREM', queue .. ':tag:' .. tag, entry)
  end
  reply[1] = looked < budget and looked == #page and 'ok' or 'more'
  request_cancels(queue, marked)
  count(queue, 'cancelled', #ids, ids)
  wake(queue, count_members(queue))
  give_room(queue)
  reply[3], reply[4] = #ids, #marked / 2
  return reply
end

-- drop_kept_jobs: deletes kept jobs by the numbers of their dispatches.
-- ARGV[4..] dropped numbers, 1000 at most
-- RETURNS ok deleted | late
-- RESEND safe: the reply is stored under the producer's number
-- NUMBERED
-- GROUP seldom
-- FLAGS allow-oom
local function drop_kept_jobs()
  local queue = KEYS[1]

  local deleted = 0
  for i = 4, #ARGV do
    local dropped = ARGV[i]
    deleted = deleted + drop_kept_job(queue, dropped)
  end
  return {'ok', deleted}
end

-- run_again: dispatches the payload of a kept job once more, as a new job with a new id, with the same meta, lane and tags; of a
-- follow-up with what had ended, of a workflow with its lifetime. Its retry settings and timeout are those of the handler.
-- ARGV[4] number of the dispatch that created the kept job
-- ARGV[5] random characters for the new id
-- RETURNS ok id number | gone | cut (its payload was too large to be kept) | late
-- RESEND safe: the reply is stored under the producer's number
-- GROUP makes
-- NUMBERED
local function run_again()
  local queue = KEYS[1]
  local number, random = ARGV[4], ARGV[5]

  check_types(queue)
  local kept = read_kept(queue, number) or {}
  if not kept.task then
    return {kept.id and 'cut' or 'gone'}
  end
  local done = kept.done ~= OF_SCHEDULE and kept_bounds(kept.done) and kept.done or nil
  local o = {random = random, lane = is_lane(kept.lane) and kept.lane or nil, done = done, workflow = kept.life and true}
  for _, name in ipairs({'meta', 'tags', 'lifetime'}) do -- another program may have spoilt them
    o[name] = kept[name] and valid_option(OPTION_KINDS[name], kept[name]) and kept[name] or nil
  end
  local wrong = invalid_job(o, kept.task, false)
  if wrong then
    return wrong
  end
  o.fields = {job_ended = kept.job_ended, batch_ended = kept.batch_ended}
  local token, now = next_token(queue)
  store_token(queue, token)
  local _, id, last, ready, made = upsert(queue, o, kept.task, digits(token), now)
  renew_counts(queue)
  count(queue, 'enqueued', made, {id})
  wake(queue, ready + count_members(queue))
  return {'ok', id, last}
end

-- trim_kept: removes entries of kept jobs whose records have expired, the oldest first. No end of a job does this in a queue that
-- has become quiet.
-- ARGV[1] limit entries to look at
-- RETURNS ok removed | more removed (all of them were: there may be more)
-- RESEND safe: a copy removes what has expired then
-- FLAGS allow-oom
local function trim_kept()
  local queue = KEYS[1]
  local limit = tonumber(ARGV[1])
  local done, done_fired = queue .. ':done', queue .. ':done_fired'

  local function trim(set, page)
    local removed, freed = 0, 0
    for _, entry in ipairs(page) do
      if redis.call('EXISTS', queue .. ':done:' .. (string.match(entry, '^%d+') or '')) == 0 then
        removed, freed = removed + redis.call('ZREM', set, entry), freed + forget_kept(queue, {entry}, 1)
      end
    end
    return removed, freed, removed == #page and removed > 0
  end

  local page, page_fired = redis.call('ZRANGE', done, 0, limit - 1), redis.call('ZRANGE', done_fired, 0, limit - 1)
  local removed, freed, more = trim(done, page)
  if removed > 0 then
    add_kept_bytes(queue, -freed)
  end
  local of_schedules = trim(done_fired, page_fired)
  return {more and 'more' or 'ok', removed + of_schedules}
end

local SHOWN = {'first', 'claim', 'worker', 'run_at', 'progress', 'message', 'failures', 'stalls', 'timeouts', 'attempts', 'error_type',
  'error_message', 'tags', 'ended', 'at', 'size', 'lane', 'reason'}

-- Returns an entry of a list of jobs: the cursor behind it, the beginning of its payload, the size of the payload, and SHOWN of its
-- `record`, as for record_fields. `room.left` is how many bytes of payload may still be read.
local function shown_job(record, cursor, id, state, room)
  local is_key = type(record) == 'string'
  local size, task = is_key and (own(redis.pcall('HSTRLEN', record, 'task')) or 0) or #(record.task or ''), ''
  if size <= room.left then
    task, room.left = record_fields(record, 'task')[1] or '', room.left - size
  end
  local shown = record_fields(record, unpack(SHOWN))
  return {cursor, id, state == 'trashed' and 'cancelled' or state, string.sub(task, 1, 100), size, unpack(shown)}
end

-- True if the `state` of a job is the one that is `wanted`: a state, `ended` for the three in which a job has ended, or empty for any.
local function is_wanted(state, wanted)
  local has_ended = state == 'finished' or state == 'failed' or state == 'cancelled'
  return state and (wanted == '' or wanted == state or wanted == 'ended' and has_ended)
end

-- True if the first of two entries ended after the second one, or is listed before it: their times (ms as text) and the entries.
local function is_later(ms, entry, other_ms, other)
  return tonumber(ms) > tonumber(other_ms) or ms == other_ms and entry > other
end

-- list_kept: one page of the kept jobs of a queue, the one that ended last first.
-- ARGV[1] state finished, failed, cancelled, or ended for all of these
-- ARGV[2] limit jobs
-- ARGV[3] budget entries to look at
-- ARGV[4] max_bytes bytes of payload that are read
-- ARGV[5] after cursor of the last entry of the page before, empty for the first page
-- ARGV[6] since ms, only jobs that have ended since; -inf: all
-- ARGV[7] tag that they have; empty: any
-- RETURNS ok after entry... | more after entry...; after is the cursor of the next page, an entry is as shown_job returns it
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_kept()
  local queue = KEYS[1]
  local state, limit, budget, max_bytes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
  local after, since, tag = ARGV[5], ARGV[6], ARGV[7]
  local done, done_fired = queue .. ':done', queue .. ':done_fired'

  local ms, entry = string.match(after, '^(%d+) (.+)$')
  local rank = entry and own(redis.pcall('ZREVRANK', done, entry))
  local start = rank and rank + 1 or ms and (own(redis.pcall('ZCOUNT', done, '(' .. ms, '+inf')) or 0) or 0
  local last = own(redis.pcall('ZCOUNT', done, since, '+inf')) or 0
  local page = start < last and redis.call('ZREVRANGE', done, start, math.min(start + budget, last) - 1, 'WITHSCORES') or {}
  local fired = permitted(redis.pcall('ZREVRANGE', done_fired, 0, 1999, 'WITHSCORES')) or {}
  local is_last = start + #page / 2 >= last
  local reply, room, unread, i, j = {'ok', after}, {left = max_bytes}, max_bytes, 1, 1
  while fired[j] and ms and not is_later(ms, entry, fired[j + 1], fired[j]) do
    j = j + 2 -- the pages before had it
  end
  while page[i] and ms and not rank and not is_later(ms, entry, page[i + 1], page[i]) do
    i, reply[2] = i + 2, page[i + 1] .. ' ' .. page[i]
  end
  while #reply - 2 < limit and room.left > 0 and unread > 0 do
    local found, score = page[i], page[i + 1]
    if fired[j] and (found and is_later(fired[j + 1], fired[j], score, found) or not found and is_last) then
      found, score, j = fired[j], fired[j + 1], j + 2
    else
      i = i + 2
    end
    if not found then
      break
    elseif since ~= '-inf' and tonumber(score) < tonumber(since) then
      is_last, i, j = true, #page + 1, #fired + 1 -- all that are left have ended earlier
      break
    end
    local number, size = string.match(found, '^(%d+) (%d+)')
    unread = unread - whole_number(size, 0)
    local kept = read_kept(queue, number or '')
    if kept and is_wanted(kept.outcome, state) and (tag == '' or has_tag(kept.tags, tag)) then
      reply[#reply + 1] = shown_job(kept, score .. ' ' .. found, kept.id, kept.outcome, room)
    end
    reply[2] = score .. ' ' .. found
  end
  reply[1] = (page[i] or not is_last or fired[j]) and 'more' or 'ok'
  return reply
end

-- list_tagged: one page of the jobs of a tag, in any state, the one that was dispatched last first.
-- ARGV[1] tag name
-- ARGV[2] state as of a job, ended for those that have ended, empty for all
-- ARGV[3] limit jobs
-- ARGV[4] budget entries to look at
-- ARGV[5] max_bytes bytes of payload that are read
-- ARGV[6] after cursor of the last entry of the page before, +inf for the first page
-- ARGV[7] since ms, of those that have ended only jobs that have done so since; -inf: all
-- RETURNS ok after entry... | more after entry... | large (the set does not have all jobs of this tag); after is the cursor of the next
--   page, an entry is as shown_job returns it, and the claim of a dead letter, or false
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_tagged()
  local queue = KEYS[1]
  local tag, state, limit, budget = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
  local max_bytes, after, since = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7]) or 0
  local key = queue .. ':tag:' .. tag

  if is_incomplete(queue, tag) then
    return {'large'}
  end
  local page = own(redis.pcall('ZRANGE', key, '(' .. after, '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, budget)) or {}
  local reply, room, unread, looked = {'ok', after}, {left = max_bytes}, max_bytes, 0
  for _, entry in ipairs(page) do
    if #reply - 2 >= limit or room.left <= 0 or unread <= 0 then
      break
    end
    local cursor, id = string.match(entry, '^(%d+) (.+)$')
    local found, state_of = find_tagged(queue, entry, tag, false)
    unread = unread - (type(found) == 'table' and whole_number(found.size, 0) or 0)
    if found and is_wanted(state_of, state) then
      local shown = shown_job(found, cursor, id, state_of, room)
      shown[#SHOWN + 6] = type(found) == 'string' and string.match(found, ':aside:(%d+)$') or false
      local ended = whole_number(shown[19] or shown[20])
      reply[#reply + 1] = (not ended or ended >= since) and shown or nil
    end
    reply[2], looked = cursor or reply[2], looked + 1
  end
  reply[1] = (looked < #page or #page == budget) and 'more' or 'ok'
  return reply
end
