local TRASHED = {'', ':suspects', ':due', ':blocked'}

-- Moves everything that waits to the trash in O(1), to be purged in steps, and stores a fence number. A task that was claimed
-- up to that number and is given back later is dropped. Callers that wait for its result receive `why`. Returns how many tasks
-- waited, or nil while an earlier clearing is still to be purged.
local function clear(base, why)
  local trash = base .. ':trash'
  if redis.call('EXISTS', trash, trash .. ':suspects', trash .. ':due', trash .. ':blocked') > 0 then
    return nil
  end
  local waiting = count_queued(base)
  for _, part in ipairs(TRASHED) do
    if redis.call('EXISTS', base .. part) == 1 then
      redis.call('RENAME', base .. part, trash .. part)
    end
  end
  local fence = next_fence(base)
  note_fence(base, fence)
  redis.call('HSET', base .. ':counts', 'cleared', digits(fence), 'cleared_why', why)
  redis.call('HDEL', base .. ':counts', 'stale')
  redis.call('EXPIRE', base .. ':counts', 2592000)
  return waiting
end
