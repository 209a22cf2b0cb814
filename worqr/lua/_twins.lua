-- The set of the jobs that were raw tasks of one payload; cancel_task reads it. If another application owns the key, the job
-- cannot be found by its payload; nothing else changes.
local function note_twin(base, digest, id)
  own(redis.pcall('SADD', base .. ':twins:' .. digest, id))
end

local function forget_twin(base, digest, id)
  own(redis.pcall('SREM', base .. ':twins:' .. digest, id))
end
