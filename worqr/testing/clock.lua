-- What TIME would answer by the clock of the bench: seconds, and microseconds of the second.
local function moved_time()
  local time, prefix = redis.call('TIME'), string.match(KEYS[1], '^{?(%w+)')
  local set = redis.call('GET', '{' .. prefix .. '}:clock') or '0'
  local ahead_ms, stopped_ms = string.match(set, '^(-?%d+) ?(%d*)$')
  local us = time[1] * 1000000 + time[2] + ahead_ms * 1000
  if stopped_ms ~= '' then
    us = stopped_ms * 1000
  end
  return {math.floor(us / 1000000), us % 1000000}
end
