#!lua flags=allow-oom
-- rewind_schedules: after the server's clock was set back, lets every schedule with a time in the future continue from now.
-- Handles one page; the last page stores that it is done.
-- KEYS[1] schedules HASH
-- KEYS[2] schedules_due ZSET
-- ARGV[1] cursor of the page before; 0 for the first
-- ARGV[2] budget, how many schedules to look at, approximately
-- RETURNS ok cursor (of the next page; 0: it is done) rewound, how many
-- RESEND safe: a copy finds no schedule in the future
local schedules, schedules_due = KEYS[1], KEYS[2]
local cursor, budget = ARGV[1], ARGV[2]

redis.call('ZCARD', schedules_due)
local now, rewound = now_ms(), 0

local function ahead(ms)
  return (tonumber(ms) or 0) > now + AHEAD_MS
end

local function rewind(name, last)
  local kept = redis.call('HMGET', schedules, 'next ' .. name, 'owed ' .. name, 'paused ' .. name)
  local at = redis.call('ZSCORE', schedules_due, name)
  local put_off = ahead(at) and tonumber(at) ~= tonumber(kept[1])
  if ahead(last) then
    local owed = {} -- without firings whose time comes again: they would be owed twice
    for nominal in string.gmatch(kept[2] or '', '%d+') do
      owed[#owed + 1] = tonumber(nominal) <= now and nominal or nil
    end
    redis.call('HSET', schedules, 'last ' .. name, digits(now), 'owed ' .. name, table.concat(owed, ' '))
    redis.call('HDEL', schedules, 'next ' .. name)
  end
  if (ahead(last) or put_off) and not kept[3] then
    schedule_check(schedules_due, name, digits(now))
  end
  rewound = rewound + (ahead(last) and 1 or 0)
end

local page = redis.call('HSCAN', schedules, cursor, 'MATCH', 'last *', 'COUNT', budget)
for i = 1, #page[2], 2 do
  rewind(string.sub(page[2][i], 6), page[2][i + 1])
end
if page[1] == '0' and redis.call('HLEN', schedules) > 0 then
  redis.call('HSET', schedules, 'clock', digits(now))
end
return {'ok', page[1], rewound}
