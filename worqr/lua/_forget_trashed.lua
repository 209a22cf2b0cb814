-- Deletes the job `id` of a deleted queue, for the `reason` stored with the deletion. The purge then skips its place in the
-- trash.
-- LATER: most calls of the scripts do not need it.
local function forget_trashed(base, id, reason)
  forget_job(base, id, any_result_ttl(base), reason)
end
