#!lua flags=no-writes
-- find_claims: looks at some keys of the server, and returns the claims among them that are not new. Which of them no worker
-- holds, adopt_claims finds out.
-- KEYS[1] queue LIST
-- ARGV[1] cursor of the call before; 0 for the first
-- ARGV[2] budget, how many keys to look at, approximately
-- ARGV[3] pattern of the keys of claims
-- ARGV[4] older_ms age of the claims that are returned
-- RETURNS ok run_id cursor key...: run_id is that of the server that was asked, a node of a cluster; cursor of the next call (0: this
--   was the last) | denied: the user may not look at the names of all keys
-- RESEND safe: it only reads
local queue = KEYS[1]
local cursor, budget, pattern, older_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

redis.call('EXISTS', queue) -- it names the node
local may = not redis.acl_check_cmd or redis.acl_check_cmd('SCAN', cursor)
if not may then
  return {'denied'}
end
local info, found = redis.pcall('INFO', 'server'), redis.call('SCAN', cursor, 'MATCH', pattern, 'COUNT', budget)
local now = now_ms()
local reply = {'ok', type(info) == 'string' and string.match(info, 'run_id:(%w+)') or '', found[1]}
for _, key in ipairs(found[2]) do
  local claim = tonumber(string.match(key, '}[%l-]*:claim:(%d+)$') or '')
  if claim and math.abs(now - claim / 1000) >= older_ms then -- also one from before the clock was set back
    reply[#reply + 1] = key
  end
end
return reply
