-- The options of a dispatch may come from any client. They are validated before anything is written, so that no worker that
-- claims the job and no caller that lists it fails on them.
local KINDS = {id = 'id', random = 'random', delay = 'whole', run_at = 'whole', unique_for = 'positive',
  max_length = 'whole', data = 'boolean', counts = 'boolean', front = 'boolean', policy = 'string',
  when = ' set keep later earlier ', exists = ' update skip raise ', expires = 'digits', expires_at = 'digits',
  scheduled_for = 'digits', meta = 'meta', fields = 'fields'}

local function are_fields(fields)
  if type(fields) ~= 'table' then
    return false
  end
  local known = ' ' .. table.concat(POLICY, ' ') .. ' '
  for name, value in pairs(fields) do
    local is_list = name == 'retry_on' or name == 'fail_on'
    if type(name) ~= 'string' or not string.find(known, ' ' .. name .. ' ', 1, true)
      or not (is_list and type(value) == 'string' and is_utf8(value) or is_digits(value)) then
      return false
    end
  end
  return true
end

local function fits(kind, value)
  if kind == 'random' then
    return type(value) == 'string' and #value >= 16 and #value <= 64 and not string.find(value, '%W')
  elseif kind == 'whole' or kind == 'positive' then
    local least = kind == 'whole' and 0 or 1
    return type(value) == 'number' and value >= least and value < 1e15 and value == math.floor(value)
  elseif kind == 'digits' then
    return is_digits(value)
  elseif kind == 'id' then
    return type(value) == 'string' and #value <= 200 and string.find(value, '^[^@]') and not string.find(value, '%c')
      and is_utf8(value)
  elseif kind == 'meta' then
    return type(value) == 'string' and #value <= 4096 and is_utf8(value)
  elseif kind == 'fields' then
    return are_fields(value)
  elseif string.find(kind, '^ ') then
    return type(value) == 'string' and not string.find(value, ' ') and string.find(kind, ' ' .. value .. ' ', 1, true)
  end
  return type(value) == kind
end

-- Returns what is wrong with the options `o` of a job with the payload `task`, as an error reply; nil if they are valid.
local function wrong_job(o, task)
  if type(o) ~= 'table' or not task then
    return redis.error_reply('ERR a job is its options, a msgpack map, and its task')
  end
  for name, value in pairs(o) do
    if not KINDS[name] then
      return redis.error_reply('ERR a dispatch has no such option: ' .. name)
    elseif not fits(KINDS[name], value) then
      return redis.error_reply('ERR the option ' .. name .. ' of a dispatch cannot be that')
    end
  end
  return nil
end
