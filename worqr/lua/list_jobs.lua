#!lua flags=no-writes
-- list_jobs: one page of waiting, due or blocked jobs, each with the cursor of the next page. Waiting jobs are listed in the
-- order in which they will be taken, with raw tasks, and then those of lanes, lane by lane; due jobs by time; blocked jobs by id.
-- KEYS[1] queue LIST
-- KEYS[2] suspects LIST
-- KEYS[3] due ZSET
-- KEYS[4] blocked SET
-- KEYS[5] counts HASH
-- ARGV[1] state waiting, due or blocked
-- ARGV[2] limit places to look at
-- ARGV[3] after cursor of the last entry of the page before, empty for the first page
-- ARGV[4] max_bytes bytes of payload after which no further entry is listed
-- RETURNS ok entry... | more entry...; an entry is its cursor and its summary, or only a cursor, for a position that was skipped
-- RESEND safe: it only reads
local queue, suspects, due, blocked, counts = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local state, limit, after = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local max_bytes = tonumber(ARGV[4])

local reply, budget, listed = {'ok'}, {left = max_bytes}, {}

-- Lists the `item` at one position, if it is in this state; returns false if the page is full.
local function list(cursor, item)
  if #reply > limit or budget.left <= 0 then
    reply[1] = 'more'
    return false
  end
  local id = job_id(item)
  -- A job that was due in between has two positions in the lists, and a cancelled job no longer has the state.
  local listable = not id or own(redis.pcall('HGET', queue .. ':job:' .. id, 'state')) == state
  if listable and not listed[item] then
    reply[#reply + 1] = {cursor, summarize(queue, 'job', item, budget)}
    listed[item] = id
  else
    reply[#reply + 1] = {cursor}
  end
  budget.left = budget.left - (id and 0 or #item)
  return true
end

local function list_positions(name, key, first, claimed, lane)
  return read_items(key, first, true, max_bytes, function(item, i)
    return list(string.format('%s %d %.0f', name, i, claimed) .. (lane and ' ' .. lane or ''), item)
  end)
end

-- Lists the jobs of all lanes, by name: from the `lane` and its position `first` on (nil: from the first lane on).
local function list_lanes_from(lane, first, claimed)
  each_lane(queue, lane, function(name, tasks)
    return list_positions('lane', tasks, name == lane and first or 0, claimed, name)
  end)
end

if state == 'waiting' then
  -- A position is counted from the front: tasks added at the back change no position. Claims move all of them ahead.
  local claimed = tonumber(redis.call('HGET', counts, 'claimed')) or 0
  local list_name, position, claimed_then, lane = string.match(after, '^(%l+) (%d+) (%d+) ?(.*)$')
  local first = math.max(0, (tonumber(position) or -1) + 1 - math.max(0, claimed - (tonumber(claimed_then) or claimed)))
  if list_name == 'lane' then
    list_lanes_from(lane, first, claimed)
  elseif (list_name == 'queue' or list_positions('suspects', suspects, first, claimed))
    and list_positions('queue', queue, list_name == 'queue' and first or 0, claimed) then
    list_lanes_from(nil, 0, claimed)
  end
elseif state == 'due' then
  local score, id = string.match(after, '^(%d+) (.*)$')
  local behind = score and redis.call('ZSCORE', due, id) == score and redis.call('ZREVRANK', due, id)
  local first = behind and redis.call('ZCARD', due) - behind
    or score and redis.call('ZCOUNT', due, '-inf', '(' .. score) or 0
  local page = redis.call('ZRANGE', due, first, first + limit, 'WITHSCORES')
  for i = 1, #page, 2 do
    list(page[i + 1] .. ' ' .. page[i], MARKER .. page[i])
  end
else
  -- There are no more blocked jobs than there are running ones, so all of them may be sorted.
  for _, id in ipairs(redis.call('SORT_RO', blocked, 'ALPHA')) do
    if id > after and not list(id, MARKER .. id) then
      break
    end
  end
end
return reply
