-- What a `redis.pcall` on a key of one job returned. nil if another application has written a key of another type there: then
-- what the queue kept under it is gone, and the job is treated like one whose record was deleted. So one such key neither ends
-- a script after its first write nor stops the other jobs of the same call. Any other error is raised.
local function own(reply)
  if type(reply) ~= 'table' or not reply.err then
    return reply
  end
  if not string.find(reply.err, '^WRONGTYPE') then
    error(reply)
  end
  return nil
end
