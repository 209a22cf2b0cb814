#!lua flags=allow-oom
-- keep_follow_ups: for how long a queue holds the follow-ups of a batch of another home. Once it has a limit, it keeps it.
-- KEYS[1] follow_ups HASH
-- ARGV[1] kept_for ms; 0: until the home says more
-- RETURNS ok
-- RESEND safe: a copy of the first request that arrives after the last one changes nothing
local follow_ups = KEYS[1]
local kept_for = tonumber(ARGV[1])

if (own(redis.pcall('HLEN', follow_ups)) or 0) == 0 then
  return {'ok'}
elseif kept_for > 0 then
  redis.call('HSET', follow_ups, 'forgotten', '1')
  redis.call('PEXPIRE', follow_ups, digits(kept_for))
elseif redis.call('HEXISTS', follow_ups, 'forgotten') == 0 then
  redis.call('PERSIST', follow_ups)
end
return {'ok'}
