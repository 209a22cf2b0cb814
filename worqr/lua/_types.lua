-- Reads the keys of a queue that its scripts write, so that one of a wrong type (a foreign application's) is an error before
-- the first write, not after it.
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
end
