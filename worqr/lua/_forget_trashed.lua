-- USES cancel result
-- Deletes the job `id` of a deleted queue, for the `reason` stored with the deletion. The purge then skips its place in the
-- trash.
local function forget_trashed(base, id, reason)
  forget_job(base, id, any_result_ttl(base), reason)
end
