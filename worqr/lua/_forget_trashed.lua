-- USES cancel result
-- Forgets the job `id` of a queue that was deleted, for the `reason` given then: its place in the trash is skipped.
local function forget_trashed(base, id, reason)
  forget_job(base, id, any_result_ttl(base), reason)
end
