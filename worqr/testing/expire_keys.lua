#!lua flags=allow-oom
-- expire_keys: says when keys of a bench expire; a moment that has passed deletes them.
-- ARGV[1..] names of keys, and ms since 1970, in turn
-- RETURNS ok
-- RESEND safe: it sets what it set
for i = 1, #ARGV, 2 do
  local name, moment = ARGV[i], ARGV[i + 1]
  redis.call('PEXPIREAT', name, moment)
end
return {'ok'}
