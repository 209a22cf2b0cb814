-- Generates the id of a job that was dispatched without one: a number that is unique on this queue, and the `random` characters
-- that its producer sent (nil: none; then the id can be guessed). In a further shard of a queue the id ends with the tag of
-- that shard, which tells where the job is.
local function new_id(base, number, random)
  local id = random and '@' .. number .. '-' .. random or '@' .. number
  if string.sub(base, -1) == '}' then
    return id
  end
  return id .. (string.match(base, '(~%w+)}%-shard') or '')
end
