-- Reads the keys of a queue that its scripts write, so that a key of a wrong type (written by another application) is an error
-- before the first write, not after it.
local function check_types(base)
  redis.call('LLEN', base)
  redis.call('LLEN', base .. ':suspects')
  redis.call('SCARD', base .. ':hungry')
  redis.call('SCARD', base .. ':cancelling')
  redis.call('HLEN', base .. ':workers')
  redis.call('HLEN', base .. ':counts')
  redis.call('ZCARD', base .. ':due')
  redis.call('SCARD', base .. ':blocked')
  redis.call('HLEN', base .. ':aside')
  redis.call('ZCARD', base .. ':failed')
  redis.call('ZCARD', base .. ':broken')
  redis.call('ZCARD', base .. ':result_ttls')
end

-- As check_types, for the other keys used when a task of `worker` goes to the dead-letter queue, and its failure handler's
-- queue.
local function check_aside_types(base, worker)
  local failures = base .. '-fail'
  redis.call('HLEN', base .. ':policy:' .. worker)
  redis.call('LLEN', failures)
  redis.call('HLEN', failures .. ':counts')
  redis.call('SCARD', failures .. ':hungry')
end
