-- Wakes one more worker if a suspect waits: the caller's ended claim may have been the one suspect that a worker may run.
local function wake_for_suspects(base)
  if redis.call('LLEN', base .. ':suspects') > 0 then
    wake(base, 1)
  end
end
