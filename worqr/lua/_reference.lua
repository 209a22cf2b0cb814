-- A task item is a payload, or this marker and the id of a job whose record holds the payload.
local MARKER = '\0worqr\0'

-- The id of the job that `item` refers to; nil for a payload.
local function job_id(item)
  if string.sub(item, 1, 7) == MARKER then
    return string.sub(item, 8)
  end
  return nil
end
