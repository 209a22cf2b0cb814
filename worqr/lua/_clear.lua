-- USES counts fence
-- Puts all that waits out of reach in O(1), to be purged in steps, and notes a fence number: what was claimed up to there and
-- is given back afterwards is dropped. Answers how many tasks waited, or nil while an earlier clearing is still to be purged.
local function clear(base)
  if redis.call('EXISTS', base .. ':trash', base .. ':trash_suspects') > 0 then
    return nil
  end
  local waiting = count_waiting(base)
  if redis.call('EXISTS', base) == 1 then
    redis.call('RENAME', base, base .. ':trash')
  end
  if redis.call('EXISTS', base .. ':suspects') == 1 then
    redis.call('RENAME', base .. ':suspects', base .. ':trash_suspects')
  end
  local fence = next_fence(base)
  note_fence(base, fence)
  redis.call('HSET', base .. ':counts', 'cleared', digits(fence))
  redis.call('HDEL', base .. ':counts', 'stale')
  redis.call('EXPIRE', base .. ':counts', 2592000)
  return waiting
end
