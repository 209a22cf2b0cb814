-- Deletes the active job `id`: its record, and its place among the jobs with the same payload; a blocked job of this id is put
-- into the queue. `how`: outcome (finished, cancelled, or gone: nothing is kept), ttl, facts, now, no_twins (no job is blocked
-- on this queue). Returns how many tasks became claimable.
-- LATER: most calls of the scripts do not need it.
local function end_job(base, id, how)
  local active = base .. ':active:' .. id
  local kept = own(redis.pcall('HMGET', active, 'twin', 'first', 'last', 'result_ttl', 'cancel_reason')) or {}
  if kept[1] then
    forget_twin(base, kept[1], id)
  end
  local result
  if how.outcome == 'cancelled' then
    result = keep_result(base, id, kept[2], kept[3], kept[4], how.ttl, 'cancelled', {'reason', kept[5] or ''})
  elseif how.outcome == 'finished' then
    result = keep_result(base, id, kept[2], kept[3], kept[4], how.ttl, 'finished', how.facts)
  else
    tell(base, id, 'gone')
  end
  keep_tries(result, active, 1)
  redis.call('DEL', active)
  return how.no_twins and 0 or unblock(base, id, how.now)
end
