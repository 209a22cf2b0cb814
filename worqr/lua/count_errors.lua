#!lua flags=no-writes
-- count_errors: counts the records of the dead-letter queue by the type of their error, those from one rank to another, the
-- oldest first.
-- KEYS[1] queue LIST
-- KEYS[2] list ZSET
-- ARGV[1] rank of the first record that is counted
-- ARGV[2] limit records
-- RETURNS ok type number... | more type number... (there are records behind them)
-- RESEND safe: it only reads
local queue, list = KEYS[1], KEYS[2]
local rank, limit = tonumber(ARGV[1]), tonumber(ARGV[2])

local numbers, page = {}, own(redis.pcall('ZRANGE', list, rank, rank + limit - 1)) or {}
for _, claim in ipairs(page) do
  local error_type = own(redis.pcall('HGET', queue .. ':aside:' .. claim, 'error_type'))
  if error_type then
    numbers[error_type] = (numbers[error_type] or 0) + 1
  end
end
local reply = {rank + #page < (own(redis.pcall('ZCARD', list)) or 0) and 'more' or 'ok'}
for error_type, number in pairs(numbers) do
  reply[#reply + 1], reply[#reply + 2] = error_type, number
end
return reply
