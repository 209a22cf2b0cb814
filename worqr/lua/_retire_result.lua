-- Makes room for the result of a newer dispatch. The result of the one before it stays for callers that are about to read it.
local function retire_result(base, id)
  local result = base .. ':result:' .. id
  if redis.call('EXISTS', result) == 1 then
    redis.call('RENAME', result, base .. ':older_result:' .. id)
  end
end
