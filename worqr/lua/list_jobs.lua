#!lua flags=no-writes
-- list_jobs: one page of waiting, due or blocked jobs, each with the cursor of the next page. Waiting jobs are listed in the
-- order in which they will be taken, with raw tasks, and then those of lanes, lane by lane; due jobs by time; blocked jobs by id.
-- Or waiting jobs from the end, those that will be taken last first: those outside lanes, and then those of lanes, lane by lane.
-- KEYS[1] queue LIST
-- KEYS[2] suspects LIST
-- KEYS[3] due ZSET
-- KEYS[4] blocked SET
-- KEYS[5] counts HASH
-- ARGV[1] state waiting, due or blocked
-- ARGV[2] limit places to look at
-- ARGV[3] after cursor of the last entry of the page before, empty for the first page
-- ARGV[4] max_bytes bytes of payload after which no further entry is listed
-- ARGV[5] from_end 1: waiting jobs from the end
-- RETURNS ok entry... | more entry...; an entry is its cursor, its summary and, if it waits, its place: how many references are
--   up to it in its lane, or outside lanes; or only a cursor, for a position that was skipped
-- RESEND safe: it only reads
local queue, suspects, due, blocked, counts = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local state, limit, after = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local max_bytes, from_end = tonumber(ARGV[4]), ARGV[5] == '1'

local reply, budget, listed, _ = {'ok'}, {left = max_bytes}, {}, redis.call('LLEN', queue) -- an error if it is no list

-- Lists the `item` at one position, if it is in this state; returns false if the page is full. `nth`: its place, nil if it does not wait.
local function list(cursor, item, nth)
  if #reply > limit or budget.left <= 0 then
    reply[1] = 'more'
    return false
  end
  local id = job_id(item)
  -- A job that was due in between has two positions in the lists, and a cancelled job no longer has the state.
  if (not id or own(redis.pcall('HGET', queue .. ':job:' .. id, 'state')) == state) and not listed[item] then
    reply[#reply + 1] = {cursor, summarize(queue, 'job', item, budget), nth}
    listed[item] = id
  else
    reply[#reply + 1] = {cursor}
  end
  budget.left = budget.left - (id and 0 or #item)
  return true
end

-- Lists one list. `last`: the position that was listed last, from the front (nil: none).
local function list_positions(name, key, last, claimed, lane)
  local length, ahead = own(redis.pcall('LLEN', key)) or 0, name == 'queue' and own(redis.pcall('LLEN', suspects)) or 0
  local first = from_end and math.max(0, length - (last or length)) or math.max(0, (last or -1) + 1)
  return length == 0 or read_items(key, first, not from_end, max_bytes, function(item, i)
    local position = from_end and length - 1 - i or i
    local cursor = string.format('%s %d %.0f', name, position, claimed) .. (lane and ' ' .. lane or '')
    return list(cursor, item, ahead + position + 1)
  end)
end

if state == 'waiting' then
  -- A position is counted from the front: tasks added at the back change no position. Claims move all of them ahead.
  local claimed = whole_number(own(redis.pcall('HGET', counts, 'claimed')), 0)
  local list_name, position, claimed_then, lane = string.match(after, '^(%l+) (%d+) (%d+) ?(.*)$')
  local last, in_lane = tonumber(position), list_name == 'lane'
  if last and not (from_end and in_lane) then -- claims in other lanes would hide tasks that are nearer to the front
    last = last - math.max(0, claimed - (tonumber(claimed_then) or claimed))
  end
  local lists = from_end and {'queue', queue, 'suspects', suspects} or {'suspects', suspects, 'queue', queue}
  if in_lane or (list_name == lists[3] or list_positions(lists[1], lists[2], last, claimed))
    and list_positions(lists[3], lists[4], list_name == lists[3] and last or nil, claimed) then
    each_lane(queue, in_lane and lane or nil, function(name, tasks) -- by name
      return list_positions('lane', tasks, name == lane and last or nil, claimed, name)
    end)
  end
elseif state == 'due' then
  local score, id = string.match(after, '^([%dinfe.+-]+) (.*)$')
  local behind = score and own(redis.pcall('ZSCORE', due, id)) == score and redis.call('ZREVRANK', due, id)
  local first = behind and redis.call('ZCARD', due) - behind
    or score and own(redis.pcall('ZCOUNT', due, '-inf', '(' .. score)) or 0
  local page = own(redis.pcall('ZRANGE', due, first, first + limit, 'WITHSCORES')) or {}
  for i = 1, #page, 2 do
    list(page[i + 1] .. ' ' .. page[i], MARKER .. page[i])
  end
else
  -- There are no more blocked jobs than there are running ones, so all of them may be sorted.
  for _, id in ipairs(own(redis.pcall('SORT_RO', blocked, 'ALPHA')) or {}) do
    if id > after and not list(id, MARKER .. id) then
      break
    end
  end
end
return reply
