#!lua flags=allow-oom
-- purge_queue: one step of emptying what was put out of reach, with the records of the jobs in it.
-- KEYS[1] queue LIST
-- KEYS[2] trash LIST
-- KEYS[3] trash_suspects LIST
-- ARGV[1] limit items
-- RETURNS ok | more
-- RESEND safe: a copy purges the next step
-- USES reference
local queue, trash, trash_suspects = KEYS[1], KEYS[2], KEYS[3]
local limit = tonumber(ARGV[1])

for _, list in ipairs({trash, trash_suspects}) do
  while limit > 0 do
    local item = redis.call('RPOP', list)
    if not item then
      break
    end
    local id = job_id(item)
    if id then
      local digest = redis.call('HGET', queue .. ':job:' .. id, 'twin')
      if digest then
        redis.call('SREM', queue .. ':twins:' .. digest, id)
      end
      redis.call('DEL', queue .. ':job:' .. id)
    end
    limit = limit - 1
  end
end
return {redis.call('EXISTS', trash, trash_suspects) > 0 and 'more' or 'ok'}
