-- Moves the claimed job `id`, which was to begin before now, to the dead-letter queue. Returns false if a key has a foreign
-- type: an error in the middle of the move would lose the task.
-- LATER: most calls of the scripts do not need it.
local function expire(base, item, id, claim, worker, fields, now)
  local can_set_aside = pcall(function()
    check_types(base)
    check_aside_types(base, worker)
  end)
  if not can_set_aside then
    return false
  end
  local how = policy_of(base, worker)
  how.kind, how.reason, how.now, how.error_traceback = 'failed', 'expired', now, ''
  how.error_type, how.error_message = 'Expired', 'it was not started before it expired'
  set_aside(base, claim, record_of(base, item, id, claim, fields), how)
  return true
end
