-- What a job keeps across its runs: the bytes that it saved last (the field `saved`, and `saved_number`), and the results of its
-- steps (`step:` and the name). The field `saved_size` has the bytes of all of them, and is missing if there is nothing.

local MOST_SAVED = 262144
local MOST_KEPT = 1048576
local STEP_BYTES = 1024 -- that a step counts at least, so that no record has more than 1,024 steps

-- True for a field that may be large: only a start reads it.
local function is_large_saved(name)
  return name == 'saved' or string.sub(name, 1, 5) == 'step:'
end

-- Returns how many bytes the step or the saved bytes (`step` is empty) count.
local function saved_bytes(step, size)
  return step == '' and size or math.max(STEP_BYTES, #step + size)
end

-- Deletes what was saved from the record `key`.
-- LATER: few jobs save anything.
local function forget_saved(key)
  for _, name in ipairs(redis.call('HKEYS', key)) do
    if is_large_saved(name) or name == 'saved_size' or name == 'saved_number' then
      redis.call('HDEL', key, name)
    end
  end
end

-- Deletes what was saved from the record `key` if it has another payload than `task`, which replaces it: what a run saved belongs
-- to its payload.
-- LATER: few jobs save anything.
local function forget_saved_of_other(key, task)
  if redis.call('HGET', key, 'task') ~= task then
    forget_saved(key)
  end
end

-- Adds what was saved in the record `fields` to the table `kept`.
-- LATER: few jobs save anything.
local function copy_saved(fields, kept)
  for name, value in pairs(fields) do
    if is_large_saved(name) or name == 'saved_size' or name == 'saved_number' then
      kept[name] = value
    end
  end
end

-- Chooses what is kept when a `blocked` job replaces the payload of the record `key`, which had `fields`. What a run saved
-- belongs to its payload. Of two that saved under one payload, the one that ran last is kept.
-- LATER: few jobs save anything.
local function merge_saved(key, fields, blocked, changes)
  local is_other = blocked.task ~= fields.task
  if is_other and fields.saved_size then
    forget_saved(key)
  end
  if is_other or not fields.saved_size then
    copy_saved(blocked, changes)
  end
end
