-- USES end_claim
-- Ends `claim` by setting its task aside. `how`: kind (failed, broken), reason, keep (cap of failed, as text; '0': none),
-- worker, error_type, error_message, error_traceback. `record`: id, task, failures, stalls, timeouts.
local function set_aside(base, claim, record, how)
  local at, list = now_ms(), base .. ':' .. how.kind
  local keep = tonumber(how.keep)
  if how.kind == 'broken' or keep > 0 then
    redis.call('HSET', base .. ':aside:' .. claim, 'task', record.task, 'id', record.id, 'reason', how.reason,
      'error_type', how.error_type, 'error_message', how.error_message, 'error_traceback', how.error_traceback,
      'failures', record.failures, 'stalls', record.stalls, 'timeouts', record.timeouts,
      'worker', how.worker, 'at', string.format('%.0f', at))
    redis.call('ZADD', list, at, claim)
  end
  if how.kind == 'failed' then
    local over = math.min(redis.call('ZCARD', list) - keep, 100)
    if over > 0 then
      local oldest = redis.call('ZPOPMIN', list, over)
      for i = 1, #oldest, 2 do
        redis.call('DEL', base .. ':aside:' .. oldest[i])
      end
    end
  end
  end_claim(base, claim)
  tally(base, how.kind, 1)
end
