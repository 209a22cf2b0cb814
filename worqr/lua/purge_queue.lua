#!lua flags=allow-oom
-- purge_queue: one step of emptying what was put out of reach, with the records of the jobs in it.
-- KEYS[1] queue LIST
-- KEYS[2] trash LIST
-- KEYS[3] trash_suspects LIST
-- KEYS[4] counts HASH
-- ARGV[1] limit items
-- RETURNS ok | more
-- RESEND safe: a copy purges the next step
-- USES reference
local queue, trash, trash_suspects, counts = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local limit = tonumber(ARGV[1])

redis.call('LLEN', trash_suspects)
local cleared = tonumber(redis.call('HGET', counts, 'cleared')) or math.huge
for _, list in ipairs({trash, trash_suspects}) do
  while limit > 0 do
    local item = redis.call('RPOP', list)
    if not item then
      break
    end
    local id = job_id(item)
    local job = id and queue .. ':job:' .. id
    local kept = id and redis.call('HMGET', job, 'twin', 'queued')
    if id and (tonumber(kept[2]) or 0) <= cleared then -- else a newer one of this id, which waits in the queue
      if kept[1] then
        redis.call('SREM', queue .. ':twins:' .. kept[1], id)
      end
      redis.call('DEL', job)
    end
    limit = limit - 1
  end
end
return {redis.call('EXISTS', trash, trash_suspects) > 0 and 'more' or 'ok'}
