#!lua flags=no-writes
-- list_lanes: one page of the lanes with tasks, by name. The first page begins with lanes without tasks that run some, are paused
-- or have rules of an operator, at most as many as a page has.
-- KEYS[1] queue LIST
-- KEYS[2] names ZSET
-- KEYS[3] running HASH
-- KEYS[4] rules HASH
-- ARGV[1] after name of the last lane of the page before, empty for the first page
-- ARGV[2] limit lanes
-- RETURNS ok lane... | more lane...; a lane is name, waiting references, running, weight, limits (text), paused (false or the
--   reason), opens_in (ms until time lets it start, -1: not known), held (1: none of its tasks may start now)
-- RESEND safe: it only reads
local queue, names, running, rules = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local after, limit = ARGV[1], tonumber(ARGV[2])

local reply, now = {'ok'}, now_ms()
local epoch = own(redis.pcall('HGET', queue .. ':lanes', 'epoch')) or false
local function list(lane)
  local of, tasks = tolerant(function() return lane_rules(queue, lane) end) or rules_of(), lane_list(queue, lane, epoch)
  local waiting = own(redis.pcall('LLEN', tasks)) or 0
  local room, opens_at = tolerant(function() return lane_room(queue, lane, of, tasks, now) end)
  local paused = of.paused_until and (of.paused_until == 0 or of.paused_until > now) and of.reason or false
  reply[#reply + 1] = {lane, waiting, whole_number(own(redis.pcall('HGET', running, lane)), 0), of.weight,
    of.limits, paused, opens_at and math.max(0, opens_at - now) or -1, room == 0 and 1 or 0}
end

if after == '' then
  local listed, others = {}, own(redis.pcall('HKEYS', running)) or {}
  for _, field in ipairs(own(redis.pcall('HKEYS', rules)) or {}) do
    others[#others + 1] = string.match(field, '^%l+:(.*)$')
  end
  for _, lane in ipairs(others) do
    if not listed[lane] and #reply <= limit and not own(redis.pcall('ZSCORE', names, lane)) then
      listed[lane] = true
      list(lane)
    end
  end
end
local page = own(redis.pcall('ZRANGEBYLEX', names, after == '' and '-' or '(' .. after, '+', 'LIMIT', 0, limit)) or {}
for _, lane in ipairs(page) do
  list(lane)
end
reply[1] = #page == limit and 'more' or 'ok'
return reply
