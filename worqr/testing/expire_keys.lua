#!lua flags=allow-oom
-- expire_keys: says when keys of a bench expire; a moment that has passed deletes them.
-- KEYS[1..] keys STRING
-- ARGV[1..] moments ms since 1970, of each key
-- RETURNS ok
-- RESEND safe: it sets what it set
for i = 1, #KEYS do
  redis.call('PEXPIREAT', KEYS[i], ARGV[i])
end
return {'ok'}
