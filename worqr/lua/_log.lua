-- The log of the mesh: a capped stream of what has happened in it, for people. All entries have the same fields.

-- Appends an entry. Does nothing if another application has written a key of another type: the work of the mesh does not depend on its log.
local function add_to_log(log, kind, who, queue, worker, job, n, text)
  if own(redis.pcall('XADD', log, 'MAXLEN', '~', 2000, '*', 'kind', kind, 'who', who, 'queue', queue, 'worker', worker,
    'job', job, 'n', n, 'text', text)) then
    redis.call('EXPIRE', log, 2592000) -- 30 days
  end
end

-- Appends that a worker has joined or left. Of more than 20 such entries in a second, the others become one entry, which has
-- their number.
local function log_member(log, kind, worker, text)
  local single, more, others = 0, nil, 0
  for _, entry in ipairs(own(redis.pcall('XREVRANGE', log, '+', digits(now_ms() - 1000), 'COUNT', 50)) or {}) do
    local fields = {}
    for i = 1, #entry[2], 2 do
      fields[entry[2][i]] = entry[2][i + 1]
    end
    if fields.kind == 'joined' or fields.kind == 'left' then
      single = single + 1
    elseif fields.kind == 'more' and not more then
      more, others = entry[1], whole_number(fields.n, 0)
    end
  end
  if single < 20 then
    add_to_log(log, kind, '', '', worker, '', '', text)
    return
  end
  if more then
    redis.call('XDEL', log, more)
  end
  add_to_log(log, 'more', '', '', '', '', digits(others + 1), 'more workers have joined or left in this second')
end
