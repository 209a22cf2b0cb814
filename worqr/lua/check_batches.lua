#!lua flags=allow-oom
-- check_batches: what the leader does for batches whose next check is due: it tells open parts of sealed and of cancelled ones again,
-- cancels those that their producer has left open, and forgets those that ended long ago.
-- KEYS[1] queue LIST
-- KEYS[2] batches ZSET
-- ARGV[1] limit batches in one call
-- RETURNS ok entry... | more entry...: more are due; an entry is id, token, cancel reason (false: none), keep, and the bases and
--   versions of parts to tell
-- RESEND safe: a copy looks at the batches that are due then
local queue, batches = KEYS[1], KEYS[2]
local limit = tonumber(ARGV[1])

check_types(queue)
local now = now_ms()
local ids = redis.call('ZRANGEBYSCORE', batches, '-inf', digits(now), 'LIMIT', 0, limit)
local reply, ready = {#ids == limit and 'more' or 'ok'}, 0
for _, id in ipairs(ids) do
  local batch = batch_key(queue, id)
  local kept = own(redis.pcall('HMGET', batch, 'state', 'open_until', 'ended_at', 'keep', 'token')) or {}
  local state, forgotten_at = kept[5] and kept[1], (tonumber(kept[3]) or 0) + (tonumber(kept[4]) or 0)
  if state == 'ended' and forgotten_at <= now and has_release(queue, batch) then
    check_batch_in(queue, id, FIRST_CHECK, now)
  elseif not state or state == 'ended' and forgotten_at <= now then
    forget_batch(queue, id)
  elseif state == 'ended' then
    check_batch_in(queue, id, forgotten_at, 0)
  elseif state == 'open' and (tonumber(kept[2]) or 0) > now then
    check_batch_in(queue, id, tonumber(kept[2]), 0)
  elseif state == 'open' then
    ready = ready + abandon_batch(queue, id, 'its producer left it open', now)
  else
    reply[#reply + 1] = check_entry(queue, id, now)
  end
end
wake(queue, ready + count_members(queue))
return reply
