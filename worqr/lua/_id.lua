-- The id of a job that nobody gave one, made of a number that nobody else on this queue gets, and of the `random` characters that
-- its producer sent (nil: none; then it can be guessed). In a further shard of a queue it ends with the tag of that shard, so
-- that whoever knows the id knows where it lies.
local function new_id(base, number, random)
  local id = random and '@' .. number .. '-' .. random or '@' .. number
  if string.sub(base, -1) == '}' then
    return id
  end
  return id .. (string.match(base, '(~%w+)}%-shard') or '')
end
