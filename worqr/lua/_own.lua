-- Returns the result of a `redis.pcall` on a key of one job, or nil if another application has written a key of another type.
-- What the queue kept there is lost, and the job is treated like a job whose record was deleted. So one such key neither aborts
-- a script after its first write nor blocks the other jobs of the same call. Any other error is raised.
local function own(reply)
  if type(reply) ~= 'table' or not reply.err then
    return reply
  end
  if not string.find(reply.err, '^WRONGTYPE') then
    error(reply)
  end
  return nil
end
