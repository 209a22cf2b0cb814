-- USES counts end_claim record set_aside
-- The one way back into the queue, for stop, retry, leave and sweep. `how`: counter ('' = free, failures, stalls),
-- limit of that counter, max_stalls, back (true: to the back), and what set_aside needs. A claim whose cancel mark
-- stands ends as cancelled, one of a queue cleared since is dropped. Answers given, cancelled, dropped, aside or gone.
-- The claim's place in the worker's set of claims is the caller's to remove.
local function give_back(base, claim, how)
  local record = read_claim(base, claim)
  if take_mark(base, claim) then
    end_claim(base, claim)
    return 'cancelled'
  end
  if not record then
    end_claim(base, claim)
    return 'gone'
  end
  if tonumber(claim) <= (tonumber(redis.call('HGET', base .. ':counts', 'cleared')) or 0) then
    end_claim(base, claim)
    tally(base, 'dropped', 1)
    return 'dropped'
  end
  if how.counter ~= '' then
    record[how.counter] = record[how.counter] + 1
    if record[how.counter] >= how.limit then
      set_aside(base, claim, record, how)
      return 'aside'
    end
  end
  record_return(base, claim, record, how.counter)
  redis.call('DEL', base .. ':claim:' .. claim)
  if how.back then
    redis.call('LPUSH', base, record.item)
  elseif record.stalls > 0 and record.stalls >= how.max_stalls - 1 then
    redis.call('RPUSH', base .. ':suspects', record.item)
  else
    redis.call('RPUSH', base, record.item)
  end
  return 'given'
end
