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

-- note_event: appends an entry to the log of the mesh.
-- ARGV[4] kind word
-- ARGV[5] who text, the person or program that did it
-- ARGV[6] queue name, or ''
-- ARGV[7] worker id, or ''
-- ARGV[8] job id, or ''
-- ARGV[9] n how many tasks it was about, or ''
-- ARGV[10] text for people
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not append it twice
-- NUMBERED
local function note_event()
  local mesh = KEYS[1]
  local kind, who, queue, worker, job, n, text = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10]
  local log = mesh .. ':log'

  add_to_log(log, kind, who, queue, worker, job, n, text)
  return {'ok'}
end

-- list_events: entries of the log of the mesh: the newest ones, the newest first; or those after an entry, the oldest first.
-- ARGV[1] limit entries
-- ARGV[2] after id of an entry, '' for the newest entries
-- RETURNS ok entry...: an entry is its id, which begins with the server's time in ms, and names and values of its fields in turn
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_events()
  local mesh = KEYS[1]
  local limit, after = ARGV[1], ARGV[2]
  local log = mesh .. ':log'

  local found
  if after == '' then
    found = redis.call('XREVRANGE', log, '+', '-', 'COUNT', limit)
  else
    found = redis.call('XRANGE', log, '(' .. after, '+', 'COUNT', limit)
  end
  local reply = {'ok'}
  for _, entry in ipairs(found) do
    reply[#reply + 1] = entry
  end
  return reply
end
