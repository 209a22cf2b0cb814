-- Values that others may have written, the time, and the stored replies of producers.

-- Values of the server: replies for keys of a wrong type, hashes as tables, numbers and texts. What a value means is in the
-- module of its entity.

-- Other programs can write the numbers in records. A script reads them by whole_number and counts them up by add_to, so none of
-- them is an error after its first write.

local LARGEST = 999999999999999 -- 15 digits: what Python accepts as a number and the server as an expiry
local LATEST = 253402300799999 -- ms since 1970: the end of the year 9999, the last one of Python's dates

-- Returns the whole number that a text has, from 0 to `most` (nil: LARGEST). Returns `default` if it has none: it is missing, or
-- another program wrote something else.
local function whole_number(text, default, most)
  local found = tonumber(text)
  if found and found >= 0 and found <= (most or LARGEST) and found % 1 == 0 then
    return found
  end
  return default
end

-- Returns the result of a `redis.pcall` on a key of one job, or nil if another application has written a key of another
-- type. What the queue kept there is lost, and the script treats the job like one whose record was deleted. So one such key
-- neither aborts a script after its first write nor blocks the other jobs of the same call. Any other error is raised, but for
-- those that have one of the words that follow.
local function own(reply, ...)
  if type(reply) ~= 'table' or not reply.err then
    return reply
  end
  for _, word in ipairs({'^WRONGTYPE', ...}) do
    if string.find(reply.err, word) then
      return nil
    end
  end
  error(reply)
end

-- As own; nil also if the user has no right to the key, which each server says in words of its own.
local function permitted(reply)
  return own(reply, '^NOPERM', '^ERR ACL failure', '^ERR The user executing')
end

-- Adds `n` to the number in a field of a hash. Returns the sum. What is no number there, or too large a one, begins anew at `n`. A
-- key of another type is an error.
local function add_to(key, field, n)
  local sum = redis.pcall('HINCRBY', key, field, n)
  if type(sum) ~= 'number' then
    own(sum, 'integer', 'overflow')
    redis.call('HSET', key, field, n)
    return n
  end
  return sum
end

-- Returns what the function `read` returns, which must not write, or nil if it cannot read what another application has
-- written: a key of another type, or a text where a number should be. A refusal, such as a missing permission, is raised.
local function tolerant(read)
  local done, first, second = pcall(read)
  if done then
    return first, second
  end
  if type(first) == 'table' then
    own(first)
  end
  return nil
end

-- Returns a whole number as text. A plain tostring would return 1.7e+15. Two integers are written in a third of the time that one
-- double takes, and each of them also fits into the 32 bits that some servers have.
local function digits(number)
  local low = number % 1000000000
  local high = (number - low) / 1000000000
  if high >= 1 and high < 1000000000 and low % 1 == 0 then
    return string.format('%d%09d', high, low)
  elseif high == 0 and low % 1 == 0 then
    return string.format('%d', low)
  end
  return string.format('%.0f', number)
end

-- True for a text of at most 15 digits: what Python accepts as a time and the server accepts as an expiry.
local function is_digits(value)
  return type(value) == 'string' and #value <= 15 and string.find(value, '^%d+$') ~= nil
end

-- True if the text is valid UTF-8.
local function is_utf8(text)
  if not string.find(text, '[\128-\255]') then
    return true
  end
  if string.find(text, '\224[\128-\159]') or string.find(text, '\237[\160-\191]')
    or string.find(text, '\240[\128-\143]') or string.find(text, '\244[\144-\191]') then
    return false
  end
  text = string.gsub(text, '[\240-\244][\128-\191][\128-\191][\128-\191]', ' ')
  text = string.gsub(text, '[\224-\239][\128-\191][\128-\191]', ' ')
  text = string.gsub(text, '[\194-\223][\128-\191]', ' ')
  return not string.find(text, '[\128-\255]')
end

-- True for a text of one line that can be stored in a record: names and ids.
local function is_line(value)
  return type(value) == 'string' and #value >= 1 and #value <= 1000 and not string.find(value, '%c') and is_utf8(value)
end

-- Returns a hash as a table; nil if it is empty, or not a hash.
local function read_hash(key)
  local flat = own(redis.pcall('HGETALL', key))
  if not flat or #flat == 0 then
    return nil
  end
  local fields = {}
  for i = 1, #flat, 2 do
    fields[flat[i]] = flat[i + 1]
  end
  return fields
end

-- Writes the table `fields` into the hash `key`. Replaces another application's value: the key is the queue's own, and by
-- now the record may be the only copy of the job.
local function write_hash(key, fields)
  local flat = {}
  for name, value in pairs(fields) do
    flat[#flat + 1] = name
    flat[#flat + 1] = value
  end
  if not own(redis.pcall('HSET', key, unpack(flat, 1, math.min(#flat, 1000)))) then
    redis.call('DEL', key)
    redis.call('HSET', key, unpack(flat, 1, math.min(#flat, 1000)))
  end
  for from = 1001, #flat, 1000 do -- another program may have written any number of steps
    redis.call('HSET', key, unpack(flat, from, math.min(from + 999, #flat)))
  end
end

-- Changes the hash `key`, which has the fields `before`, so that it has the fields `after`.
local function replace_hash(key, before, after)
  local changed = {}
  for name in pairs(before) do
    if after[name] == nil then
      redis.call('HDEL', key, name)
    end
  end
  for name, value in pairs(after) do
    changed[name] = before[name] ~= value and value or nil
  end
  if next(changed) then
    write_hash(key, changed)
  end
end

-- Sets the field `name` of the hash `key`, or deletes it if `value` is false. Does nothing if the key is not a hash.
local function set_field(key, name, value)
  if value then
    own(redis.pcall('HSET', key, name, value))
  else
    own(redis.pcall('HDEL', key, name))
  end
end

-- Time: the server's clock, the rules by which a dispatch moves a due time, and the clock of the schedules.

-- Returns the server's clock in milliseconds.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Later than every due time: the largest whole number that a double holds.
local NEVER = 9007199254740991

-- Returns the least time (ms) in a sorted set of times; nil if it is empty. Other programs may have added any score.
local function first_time(key)
  local score = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
  return score and clamp(math.floor(tonumber(score)), 0, LATEST)
end

-- Returns the rule by which a dispatch moves a due time, as a minimum and a maximum. Two such rules combine into one of the
-- same form. `asked` is the time that the dispatch asks for.
local function due_bounds(when, asked)
  local lower = (when == 'keep' or when == 'earlier') and 0 or asked
  local upper = (when == 'keep' or when == 'later') and NEVER or asked
  return lower, upper
end

-- Returns the value, or the bound that it is beyond.
local function clamp(value, lower, upper)
  return math.max(lower, math.min(value, upper))
end

-- True if the dispatch `o` changes the due time of the job. A relative time is compared by its delay: the clock may advance
-- between two equal dispatches, so the resulting milliseconds may differ.
local function changes_due_time(o, kept, run_at, asked, now)
  if o.run_at or o.when == 'earlier' or o.when == 'keep' then
    return run_at ~= kept.run_at
  elseif kept.state == 'waiting' then
    return run_at > now -- else the position stays
  end
  return run_at == asked and not (o.at_most and run_at == kept.run_at)
end

-- True if the dispatch `o` changes when the job expires, which may be relative to the due time.
local function changes_expiry(job, o)
  local kept = redis.call('HMGET', job, 'expires', 'expires_at')
  return (kept[1] or nil) ~= o.expires or (kept[2] or nil) ~= o.expires_at or o.expires ~= nil and not o.run_at
end

-- By how much the server's clock may be set back before schedules continue from the new time. If it was set back by less, a
-- schedule waits until the clock has caught up. The field 'clock' is the latest time at which schedules were judged.
local AHEAD_MS = 60000

-- True if the server's clock was set back by more than AHEAD_MS since schedules were last judged.
local function clock_was_set_back(schedules, now)
  return whole_number(redis.call('HGET', schedules, 'clock'), 0, LATEST) > now + AHEAD_MS
end

-- Stores the current time as the last time at which schedules were judged, at most once per second.
local function store_clock(schedules, now)
  if now - whole_number(redis.call('HGET', schedules, 'clock'), 0, LATEST) >= 1000 then
    redis.call('HSET', schedules, 'clock', digits(now))
  end
end

-- Sets when a leader is to check schedules again. `checks`: times (ms) and names in turn.
local function schedule_check(schedules_due, checks)
  local new = checks[1] and redis.call('ZADD', schedules_due, unpack(checks)) or 0
  if new > 0 and redis.call('ZCARD', schedules_due) == new then
    if redis.call('EXISTS', string.sub(schedules_due, 1, -4) .. 'stored') == 0 then
      redis.call('EXPIRE', schedules_due, 2592000) -- 30 days: the set was empty, and had no expiry
    end
  end
end

-- The stored replies of a producer, by which a repeated or late copy of a request changes nothing.
-- Requests carry (producer, number). A reply is stored until the producer no longer needs it. Most replies are {'ok', n}: those with
-- successive numbers and the same n are a run, and stored together. Any other reply has a field of its own, named by its number.
-- The field 'state' has the numbers LOW FIRST LAST N OLDEST NEWEST: the lowest number that the producer may still send; the run,
-- with its n; and the lowest and the highest number that may have a field. FIRST is above LAST if there is no run, and OLDEST is above
-- NEWEST if there is no field. A number is new if it is not below LOW, not in the run, and has no field.

local REPLIES_EXPIRE = 3600
local EXACT = 9007199254740991 -- above it, a number plus 1 may be the same number, and no loop over such numbers ends

-- Returns the six numbers of a producer's state. A state that another program wrote counts as none.
local function producer_state(text)
  local low, first, last, n, oldest, newest = string.match(text or '', '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
  low, oldest = tonumber(low), tonumber(oldest)
  if low and low <= EXACT and oldest <= EXACT then
    return low, tonumber(first), tonumber(last), tonumber(n), oldest, tonumber(newest)
  end
  return 0, 1, 0, 0, 1, 0
end

-- Returns the reply to a request seen before: it is stored in `kept`, or in the run with `n`. Renews what is stored.
local function repeated_reply(producer, kept, n)
  redis.call('EXPIRE', producer, REPLIES_EXPIRE)
  if not kept then
    return {'ok', n}
  end
  local is_read, reply = pcall(cmsgpack.unpack, kept)
  return is_read and type(reply) == 'table' and reply or redis.error_reply('ERR the stored reply to this request cannot be read')
end

-- Deletes the replies below `low` that have a field, at most 1000 at a time. Returns the numbers that may have one afterwards.
local function forget_replies(producer, low, oldest, newest)
  local above, gone = math.min(low, newest + 1, oldest + 1000), {}
  for n = oldest, above - 1 do
    gone[#gone + 1] = digits(n)
  end
  redis.call('HDEL', producer, unpack(gone))
  return above, newest
end

-- Returns true for a reply that may be in a run: ok and a whole number.
local function is_plain(reply)
  return #reply == 2 and reply[1] == 'ok' and type(reply[2]) == 'number' and whole_number(reply[2]) ~= nil
end

-- Runs a script whose header says NUMBERED: the loader puts its body into `transaction`. Its reply is stored, a refusal
-- too. An error is not stored, because it wrote nothing: the same number may come again and take effect then. A number below
-- `lowest` is late: the producer has abandoned it, or has its reply.
local function numbered(base, id, text, lowest, transaction)
  local producer, number, least = base .. ':producer:' .. id, tonumber(text), tonumber(lowest)
  assert(number and least and number <= EXACT and least <= EXACT and string.find(text, '^%d+$') and string.find(lowest, '^%d+$'),
    'the number of a request and the lowest unanswered one must be whole numbers below 2^53')
  local stored = redis.call('HMGET', producer, text, 'state')
  local low, first, last, n, oldest, newest = producer_state(stored[2])
  if number < low then
    return {'late'}
  elseif stored[1] or number >= first and number <= last then
    return repeated_reply(producer, stored[1], n)
  end
  local reply = transaction()
  if reply.err then
    return reply
  end
  low = math.max(low, least)
  if oldest <= newest and oldest < low then
    oldest, newest = forget_replies(producer, low, oldest, newest)
  end
  local plain, packed = is_plain(reply), nil
  if plain and number == last + 1 and first <= last and reply[2] == n then
    last = number
  elseif plain and last < low then -- no number of the run is needed
    first, last, n = number, number, reply[2]
  else
    packed = cmsgpack.pack(reply)
    oldest, newest = oldest <= newest and math.min(oldest, number) or number, math.max(newest, number)
  end
  local small = low + last + n + newest < 2147483648 -- as integers, which are written faster, they fit into 32 bits
  local state = string.format(small and '%d %d %d %d %d %d' or '%.0f %.0f %.0f %.0f %.0f %.0f', low, first, last, n, oldest, newest)
  if packed then
    redis.call('HSET', producer, 'state', state, text, packed)
  else
    redis.call('HSET', producer, 'state', state)
  end
  redis.call('EXPIRE', producer, REPLIES_EXPIRE)
  return reply
end
