-- The id of a job that nobody gave one, made of a number that nobody else on this queue gets: in a further shard of a queue it
-- ends with the tag of that shard, so that whoever knows the id knows where it lies.
local function new_id(base, number)
  if string.sub(base, -1) == '}' then
    return '@' .. number
  end
  return '@' .. number .. (string.match(base, '(~%w+)}%-shard') or '')
end
