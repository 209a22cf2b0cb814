-- Reads the state of the id `id`: `job`, if it is waiting, due or blocked; `active`, true while it runs; `taken`, true while
-- the id is reserved; `last`, the newest of its dispatches. A record in the trash does not count, but `trashed` has the reason
-- for the deletion, which holds for the whole id.
local function look_for(base, id)
  local kept = redis.call('HMGET', base .. ':job:' .. id, 'state', 'queued', 'run_at', 'last', 'update_low',
    'update_high', 'update_policy')
  local active = redis.call('HMGET', base .. ':active:' .. id, 'claim', 'last')
  local cleared = redis.call('HMGET', base .. ':counts', 'cleared', 'cleared_why')
  local trashed = kept[1] and tonumber(kept[2]) <= (tonumber(cleared[1]) or 0) and (cleared[2] or '') or nil
  local taken = redis.call('GET', base .. ':taken:' .. id)
  if trashed then
    taken = false
  end
  local seen = {active = active[1] and true, taken = taken and true, trashed = trashed}
  seen.last = active[2] or taken or '0'
  if kept[1] and not trashed then
    seen.job = {state = kept[1], run_at = tonumber(kept[3]), low = tonumber(kept[5]), high = tonumber(kept[6]),
      policy = kept[7] or ''}
    seen.last = kept[4]
  end
  return seen
end

-- Returns why the dispatch `o` stores nothing: duplicate, unchanged, full; or nil. `more`: jobs that are stored before it.
local function refusal(base, o, seen, more)
  if seen.job or seen.active or seen.taken then
    if o.exists == 'raise' then
      return 'duplicate'
    elseif o.exists == 'skip' or not seen.job and not seen.active then
      return 'unchanged'
    end
  end
  return not seen.job and o.max_length and count_queued(base) + more >= o.max_length and 'full' or nil
end
