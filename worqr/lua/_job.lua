-- True if the dispatch `number` (0: any) is among those from `first` to `last`.
local function covers(number, first, last)
  return number == 0 or (number >= (tonumber(first) or 0) and number <= (tonumber(last) or 0))
end

-- The key and the status of the result of the dispatch `number`, or nil. 0 is the newest dispatch; the older result never
-- belongs to it, even if the newest kept none.
local function ended_as(result, older_result, number)
  for _, key in ipairs({result, number ~= 0 and older_result or nil}) do
    local kept = redis.call('HMGET', key, 'outcome', 'first', 'last')
    if kept[1] and covers(number, kept[2], kept[3]) then
      return key, kept[1]
    end
  end
  return nil
end

-- The key of the dead-letter record of the job `id`, dispatch `number` (0: the newest); nil if there is none. `stem` is the
-- prefix of such keys. Reads the newest 100 records of the id.
local function aside_of(aside_index, stem, id, number)
  local claim = redis.call('HGET', aside_index, id)
  for _ = 1, 100 do
    local kept = claim and redis.call('HMGET', stem .. claim, 'task', 'first', 'last', 'older')
    if not kept then
      return nil
    elseif kept[1] and (not kept[2] or covers(number, kept[2], kept[3])) then
      return stem .. claim
    end
    claim = kept[4]
  end
end

-- The record of a job that has not ended: its key and its kind, active or job. If both exist, the active one, unless the
-- dispatch `number` belongs to the other. nil if there is none; a record in the trash does not count.
local function live_record(active, job, counts, number)
  local run = redis.call('HMGET', active, 'claim', 'first', 'last')
  if run[1] and covers(number, run[2], run[3]) then
    return active
  end
  local kept = redis.call('HMGET', job, 'queued', 'first', 'last')
  if kept[1] and covers(number, kept[2], kept[3])
    and tonumber(kept[1]) > (tonumber(redis.call('HGET', counts, 'cleared')) or 0) then
    return job
  end
  return nil
end
