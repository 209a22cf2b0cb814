-- Returns the entry of a start for the claimed `item`: the payload, or for a job its record as names and values, with its id;
-- false if the record is gone.
local function entry_of(base, item)
  local id = item and job_id(item)
  if not id then
    return item
  end
  local entry = own(redis.pcall('HGETALL', base .. ':active:' .. id))
  if not entry or #entry == 0 then
    return false
  end
  entry[#entry + 1], entry[#entry + 2] = 'id', id
  return entry
end

-- Adds to `reply` the entries of the `count` claims from `first` on, which an earlier start has claimed.
local function claimed_again(base, reply, first, count)
  for i = 0, count - 1 do
    local item = own(redis.pcall('LINDEX', base .. ':claim:' .. digits(first + i), 0))
    reply[#reply + 1] = entry_of(base, item) or false
  end
  return reply
end

-- Returns the reply to a start that claims nothing: the worker does not serve the queue, or the request is a copy. `place` is
-- what the fence holds of the worker. For any other request: nil, and the claim under which the worker took its last suspect.
local function started_before(base, place, number)
  if not place then
    return {'not_serving'}
  end
  local last, first, count, suspect = string.match(place, '^(%d+) (%d+) (%d+) (%d+)$')
  if number < tonumber(last) then
    return {'late'}
  end
  if number == tonumber(last) then
    return claimed_again(base, {'ok', first}, first, count)
  end
  return nil, suspect
end
