-- USES own
-- The set of the jobs that were raw tasks of one payload; cancel_task reads it. Where the key belongs to another application, a
-- job is only not found by its payload.
local function note_twin(base, digest, id)
  own(redis.pcall('SADD', base .. ':twins:' .. digest, id))
end

local function forget_twin(base, digest, id)
  own(redis.pcall('SREM', base .. ':twins:' .. digest, id))
end
