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

-- Returns a whole number as text. A plain tostring would return 1.7e+15.
local function digits(number)
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
-- LATER: few scripts get such texts from other programs.
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

-- Sets the field `name` of the hash `key`, or deletes it if `value` is false. Does nothing if the key is not a hash.
local function set_field(key, name, value)
  if value then
    own(redis.pcall('HSET', key, name, value))
  else
    own(redis.pcall('HDEL', key, name))
  end
end
