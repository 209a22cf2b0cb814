-- The registry of the mesh: workers, heartbeats, the lease of the leader, names of queues, shards.

-- start_worker: registers a worker; refuses a mesh of another wire version.
-- ARGV[4] worker id
-- ARGV[5] keepalive_ms ms until the worker counts as dead, 0: never
-- ARGV[6] wire_version whole number
-- ARGV[7] info_expire_s s
-- ARGV[8] text for the log of the mesh
-- ARGV[9..] facts names and values in turn, for people
-- RETURNS ok | version found | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not register a worker that left
-- NUMBERED
-- FLAGS allow-oom
local function start_worker()
  local mesh = KEYS[1]
  local worker, keepalive_ms = ARGV[4], tonumber(ARGV[5])
  local wire_version, info_expire_s, text = ARGV[6], ARGV[7], ARGV[8]
  local registered, worker_key, version = mesh .. ':Workers', mesh .. ':worker:' .. worker, mesh .. ':version'
  local info, log = mesh .. ':info:' .. worker, mesh .. ':log'

  local found = redis.call('GET', version)
  if found and found ~= wire_version then
    return {'version', found}
  end
  redis.call('SCARD', registered)
  redis.call('HLEN', info)
  if not found then
    redis.call('SET', version, wire_version)
  end
  redis.call('SADD', registered, worker)
  if keepalive_ms > 0 then
    redis.call('SET', worker_key, 'RUN 0', 'PX', keepalive_ms)
  else
    redis.call('SET', worker_key, 'STAY')
  end
  for i = 9, #ARGV, 2 do
    local fact, value = ARGV[i], ARGV[i + 1]
    redis.call('HSET', info, fact, value)
  end
  redis.call('HSET', info, 'started', digits(now_ms()))
  redis.call('EXPIRE', info, info_expire_s)
  log_member(log, 'joined', worker, text)
  return {'ok'}
end

-- keep_worker_alive: one heartbeat. Renews the key of a worker that was not declared dead, even an expired key. Takes or
-- renews the leader's lease if asked to. Returns the lease and the queues with waiting tasks. If a lease stops changing,
-- the worker takes it from its holder: a lease does not expire after the server's clock was set back. Notes since when all
-- heartbeats found no room.
-- ARGV[1] worker id
-- ARGV[2] beat number
-- ARGV[3] keepalive_ms ms until the worker counts as dead, 0: never
-- ARGV[4] lease_ms ms, 0: do not ask for the lease
-- ARGV[5] info_expire_s s
-- ARGV[6] running tasks, for people
-- ARGV[7] room tasks, for people
-- ARGV[8] lag_ms ms by which its event loop was late, for people
-- ARGV[9] leaving 1 if it leaves, 2 if it is quiet, else 0, for people
-- ARGV[10] standing text, the lease that this worker has seen unchanged for longer than a lease lasts, '' for none
-- ARGV[11] answer text to the last request of an operator, after the id of that request; '' for none
-- RETURNS ok leads lease request queue... | revived leads lease request queue... | dead; request: what an operator asks, and the
--   worker has not answered, '' for nothing
-- RESEND safe: it sets what it set; a late copy gives a worker that is still registered one keepalive more
-- FLAGS allow-oom
local function keep_worker_alive()
  local mesh = KEYS[1]
  local worker, beat, keepalive_ms, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
  local RENEWALS = 4 -- of the expiry, at least, in the time that it lasts and in which nothing else was written
  local info_expire_s, running, room, lag_ms, leaving = ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]
  local standing, answer = ARGV[10], ARGV[11]
  local registered, worker_key, leader = mesh .. ':Workers', mesh .. ':worker:' .. worker, mesh .. ':leader'
  local waiting, info = mesh .. ':waiting', mesh .. ':info:' .. worker

  if redis.call('SISMEMBER', registered, worker) == 0 then
    return {'dead'}
  end
  local status = redis.call('EXISTS', worker_key) == 1 and 'ok' or 'revived'
  local lease, waits = own(redis.pcall('GET', leader)), own(redis.pcall('SMEMBERS', waiting)) or {}
  local known = own(redis.pcall('HMGET', info, 'running', 'room', 'lag_ms', 'leaving', 'full_since', 'request')) or {}
  local is_full, was_full = tonumber(room) <= 0 and tonumber(running) > 0, known[5]
  if known[1] ~= running or known[2] ~= room or known[3] ~= lag_ms or known[4] ~= leaving then
    write_hash(info, {running = running, room = room, lag_ms = lag_ms, leaving = leaving})
    redis.call('EXPIRE', info, info_expire_s)
  elseif keepalive_ms <= 0 or beat % math.max(1, math.floor(info_expire_s * 1000 / keepalive_ms / RENEWALS)) == 0 then
    redis.call('EXPIRE', info, info_expire_s)
  end
  if is_full and not was_full then
    redis.call('HSET', info, 'full_since', digits(now_ms()))
  elseif was_full and not is_full then
    redis.call('HDEL', info, 'full_since')
  end
  if keepalive_ms > 0 then
    redis.call('SET', worker_key, 'RUN ' .. beat, 'PX', keepalive_ms)
  else
    redis.call('SET', worker_key, 'STAY')
  end
  local leads = 0
  if lease_ms > 0 and (not lease or lease == standing or string.match(lease, '^(.*) %d+$') == worker) then
    lease = worker .. ' ' .. beat
    redis.call('SET', leader, lease, 'PX', lease_ms)
    leads = 1
  end
  local request = known[6] or ''
  if answer ~= '' and request ~= '' and string.match(answer, '^%d+') == string.match(request, '^%d+') then
    redis.call('HSET', info, 'answer', answer)
    redis.call('HDEL', info, 'request')
    request = ''
  end
  local reply = {status, leads, lease or '', request}
  for _, queue in ipairs(waits) do
    reply[#reply + 1] = queue
  end
  return reply
end

-- ask_worker: stores what an operator asks of a worker. The reply to its next heartbeat has it, until the worker has answered.
-- An earlier request that was not answered yet is replaced, but for the part that the new one does not name.
-- ARGV[4] worker id
-- ARGV[5] mode text, '' to ask for none
-- ARGV[6] concurrency text, '' to ask for none
-- ARGV[7] info_expire_s s
-- RETURNS ok | unknown | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not replace a newer request
-- NUMBERED
-- FLAGS allow-oom
local function ask_worker()
  local mesh = KEYS[1]
  local worker, mode, concurrency, info_expire_s = ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  local registered, info = mesh .. ':Workers', mesh .. ':info:' .. worker

  if redis.call('SISMEMBER', registered, worker) == 0 then
    return {'unknown'}
  end
  local kept = redis.call('HGET', info, 'request') or ''
  local before, kept_mode, kept_concurrency = string.match(kept, '^(%d+) (%S+) (%S+)$')
  local id = digits(math.max(now_ms(), whole_number(before, 0) + 1))
  mode = mode ~= '' and mode or kept_mode or '-'
  concurrency = concurrency ~= '' and concurrency or kept_concurrency or '-'
  redis.call('HSET', info, 'request', id .. ' ' .. mode .. ' ' .. concurrency)
  redis.call('HDEL', info, 'answer')
  redis.call('EXPIRE', info, info_expire_s)
  return {'ok'}
end

-- stop_worker: a worker that no longer serves a queue leaves the registry, and releases the leader's lease.
-- ARGV[1] worker id
-- RETURNS ok | busy queue... (its work map is not empty: stop_work and unmap_work first) | gone (it was declared dead)
-- RESEND safe: worker ids are never used again
-- FLAGS allow-oom
local function stop_worker()
  local mesh = KEYS[1]
  local worker = ARGV[1]
  local registered, worker_key = mesh .. ':Workers', mesh .. ':worker:' .. worker
  local work_map, info, leader = mesh .. ':WorkMap:' .. worker, mesh .. ':info:' .. worker, mesh .. ':leader'
  local log = mesh .. ':log'

  if redis.call('SISMEMBER', registered, worker) == 0 then
    return {'gone'}
  end
  local reply = {'busy'}
  for _, queue in ipairs(own(redis.pcall('SRANDMEMBER', work_map, 100)) or {}) do
    reply[#reply + 1] = queue
  end
  if #reply > 1 then
    return reply
  end
  local lease = own(redis.pcall('GET', leader))
  redis.call('SREM', registered, worker)
  redis.call('DEL', worker_key, info, work_map)
  if lease and string.match(lease, '^(.*) %d+$') == worker then
    redis.call('DEL', leader)
  end
  log_member(log, 'left', worker, '')
  return {'ok'}
end

-- map_work: notes that a registered worker is about to serve a queue. Call it before start_work.
-- ARGV[4] worker id
-- ARGV[5] queue name
-- ARGV[6] queues_expire_s s
-- RETURNS ok | dead (the worker was declared dead, or never registered) | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not map what was unmapped
-- NUMBERED
-- FLAGS allow-oom
local function map_work()
  local mesh = KEYS[1]
  local worker, queue, queues_expire_s = ARGV[4], ARGV[5], ARGV[6]
  local registered, work_map, queues = mesh .. ':Workers', mesh .. ':WorkMap:' .. worker, mesh .. ':queues'

  if redis.call('SISMEMBER', registered, worker) == 0 then
    return {'dead'}
  end
  redis.call('ZCARD', queues)
  redis.call('SADD', work_map, queue)
  redis.call('ZADD', queues, now_ms(), queue)
  redis.call('EXPIRE', queues, queues_expire_s)
  return {'ok'}
end

-- unmap_work: notes that a worker no longer serves a queue. Call it after the queue's stop_work or fail_worker returned ok.
-- ARGV[4] worker id
-- ARGV[5] queue name
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not unmap what was mapped again
-- NUMBERED
-- FLAGS allow-oom
local function unmap_work()
  local mesh = KEYS[1]
  local worker, queue = ARGV[4], ARGV[5]
  local work_map = mesh .. ':WorkMap:' .. worker

  redis.call('SREM', work_map, queue)
  return {'ok'}
end

-- look_at_workers: returns, for the leader, the registered workers with their heartbeats, and the dead workers in recovery.
-- RETURNS ok run_id beats dying: beats are worker ids and heartbeats (false: none) in turn; run_id '' if INFO is not allowed
-- RESEND safe: it only reads
-- FLAGS no-writes
local function look_at_workers()
  local mesh = KEYS[1]
  local registered, dying = mesh .. ':Workers', mesh .. ':Dying'

  local info = redis.pcall('INFO', 'server')
  local run_id = type(info) == 'string' and string.match(info, 'run_id:(%w+)') or ''
  local FOREIGN, beats = 'another application has written a key of another type', {}
  for _, worker in ipairs(redis.call('SMEMBERS', registered)) do
    beats[#beats + 1] = worker
    local beat = own(redis.pcall('GET', mesh .. ':worker:' .. worker))
    beats[#beats + 1] = beat == nil and FOREIGN or beat
  end
  return {'ok', run_id, beats, own(redis.pcall('SMEMBERS', dying)) or {}}
end

-- condemn_worker: the first step of a recovery: declares a worker dead if its heartbeat is still what the leader saw. From then
-- on its own heartbeats return dead. The constant heartbeat (STAY) of a worker that never counts as dead is an exception.
-- To evict a worker, condemn it with any heartbeat.
-- ARGV[1] worker id
-- ARGV[2] seen heartbeat that stopped, '' if the key is missing, '*' to condemn it with any heartbeat
-- ARGV[3] who text, the person or program that evicts it, for the log of the mesh
-- ARGV[4] text why, for the log of the mesh
-- RETURNS ok | alive | gone (it left, or was recovered before)
-- RESEND safe: worker ids are never used again
-- FLAGS allow-oom
local function condemn_worker()
  local mesh = KEYS[1]
  local worker, seen, who, text = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
  local registered, dying, worker_key = mesh .. ':Workers', mesh .. ':Dying', mesh .. ':worker:' .. worker
  local log = mesh .. ':log'

  if redis.call('SISMEMBER', registered, worker) == 0 then
    return {redis.call('SISMEMBER', dying, worker) == 1 and 'ok' or 'gone'}
  end
  local beat = own(redis.pcall('GET', worker_key))
  if seen ~= '*' and beat and (beat ~= seen or beat == 'STAY') then
    return {'alive'}
  end
  redis.call('SMOVE', registered, dying, worker)
  redis.call('DEL', worker_key)
  add_to_log(log, 'dead', who, '', worker, '', '', text)
  return {'ok'}
end

-- forget_worker: the last step of a dead worker's recovery, after all its queues were given back and unmapped.
-- ARGV[1] worker id
-- RETURNS ok | busy queue... (queues that are still mapped)
-- RESEND safe: worker ids are never used again
-- FLAGS allow-oom
local function forget_worker()
  local mesh = KEYS[1]
  local worker = ARGV[1]
  local dying, work_map, info = mesh .. ':Dying', mesh .. ':WorkMap:' .. worker, mesh .. ':info:' .. worker

  local reply = {'busy'}
  for _, queue in ipairs(own(redis.pcall('SRANDMEMBER', work_map, 100)) or {}) do
    reply[#reply + 1] = queue
  end
  if #reply > 1 then
    return reply
  end
  redis.call('SREM', dying, worker)
  redis.call('DEL', info, work_map)
  return {'ok'}
end

-- adopt_worker: marks a worker as dead that serves a queue but is not registered. Its claims are then recovered like those
-- of any other dead worker, even if a leader dies in between.
-- ARGV[1] worker id
-- ARGV[2] queue name
-- RETURNS ok | alive (it is registered)
-- RESEND safe: worker ids are never used again, and what is already given back is not given back twice
-- FLAGS allow-oom
local function adopt_worker()
  local mesh = KEYS[1]
  local worker, queue = ARGV[1], ARGV[2]
  local registered, dying, work_map = mesh .. ':Workers', mesh .. ':Dying', mesh .. ':WorkMap:' .. worker

  if redis.call('SISMEMBER', registered, worker) == 1 then
    return {'alive'}
  end
  redis.call('SCARD', work_map)
  redis.call('SADD', dying, worker)
  redis.call('SADD', work_map, queue)
  return {'ok'}
end

-- list_workers: one page of the workers, by id, for people: the registered ones, and dead ones whose tasks are being given back.
-- ARGV[1] after text, the last worker id of the page before, '' for the first page
-- ARGV[2] limit workers in one page
-- ARGV[3] queue_limit names of queues after which a page ends
-- ARGV[4] last worker id after which none is listed, '' for none
-- RETURNS ok lease cursors entry...: lease is that of the leader ('' for none); cursors are the ids after which the further pages
--   begin, so that they can be read side by side; an entry is worker dead ttl_ms facts queues, with dead 1 or 0
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_workers()
  local mesh = KEYS[1]
  local after, limit, queue_limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
  local last = ARGV[4]
  local registered, dying, leader = mesh .. ':Workers', mesh .. ':Dying', mesh .. ':leader'

  limit = math.max(1, limit)
  local workers, dead = {}, {}
  for _, worker in ipairs(own(redis.pcall('SMEMBERS', registered)) or {}) do
    if worker > after and (last == '' or worker <= last) then
      workers[#workers + 1] = worker
    end
  end
  for _, worker in ipairs(own(redis.pcall('SMEMBERS', dying)) or {}) do
    if worker > after and (last == '' or worker <= last) then
      workers[#workers + 1] = worker
      dead[worker] = 1
    end
  end
  table.sort(workers)
  local cursors, listed = {}, 0
  local reply = {'ok', own(redis.pcall('GET', leader)) or '', cursors}
  for n, worker in ipairs(workers) do
    if n > limit or listed >= queue_limit then
      for start = n - 1, #workers - 1, limit do
        cursors[#cursors + 1] = workers[start]
      end
      break
    end
    local queues = own(redis.pcall('SMEMBERS', mesh .. ':WorkMap:' .. worker)) or {}
    listed = listed + #queues
    reply[#reply + 1] = {worker, dead[worker] or 0, redis.call('PTTL', mesh .. ':worker:' .. worker),
      own(redis.pcall('HGETALL', mesh .. ':info:' .. worker)) or {}, queues}
  end
  return reply
end

-- post_scan: what the leader's scan has found: the queues with waiting tasks, for every heartbeat, and the snapshot of the mesh
-- while a program reads it.
-- ARGV[1] waiting_expire_s s
-- ARGV[2] snapshot_expire_s s
-- ARGV[3] stored bytes, the new snapshot as msgpack, '' for none
-- ARGV[4..] names of non-empty, unpaused queues, at most 100
-- RETURNS ok
-- RESEND safe: it stores the same again; the stored names are a hint
-- FLAGS allow-oom
local function post_scan()
  local mesh = KEYS[1]
  local waiting_expire_s, snapshot_expire_s, stored = ARGV[1], ARGV[2], ARGV[3]
  local waiting, snapshot = mesh .. ':waiting', mesh .. ':snapshot'

  redis.call('DEL', waiting)
  for i = 4, #ARGV do
    local name = ARGV[i]
    redis.call('SADD', waiting, name)
  end
  redis.call('EXPIRE', waiting, waiting_expire_s)
  if stored ~= '' then
    redis.call('SET', snapshot, stored, 'EX', snapshot_expire_s)
    redis.pcall('PUBLISH', mesh .. ':snapshots', 'written')
  end
  return {'ok'}
end

-- read_snapshot: returns the newest snapshot of the mesh, and how full the server's memory is; asks the leader to go on writing
-- snapshots.
-- ARGV[1] watched_expire_s s
-- RETURNS ok now stored used limit: now is the server's time in ms, stored the snapshot as msgpack, false if there is none; used
--   are the bytes that count against the limit of its memory. A limit of 0: there is none, or the user may not ask
-- RESEND safe: it sets what it set
-- FLAGS allow-oom
local function read_snapshot()
  local mesh = KEYS[1]
  local watched_expire_s = ARGV[1]
  local snapshot, watched = mesh .. ':snapshot', mesh .. ':watched'

  local stored = own(redis.pcall('GET', snapshot)) or false
  redis.call('SET', watched, '1', 'EX', watched_expire_s)
  local info = redis.pcall('INFO', 'memory')
  local memory = type(info) == 'string' and info or ''
  local function value(name)
    return tonumber(string.match(memory, '\n' .. name .. ':(%d+)')) or 0
  end
  return {'ok', now_ms(), stored, value('used_memory') - value('mem_not_counted_for_evict'), value('maxmemory')}
end

-- list_queues: one page of the names of all queues, the most recently noted first.
-- ARGV[1] limit names in one page
-- ARGV[2] after_noted ms at which the last name of the page before was noted, '' for the first page
-- ARGV[3] after_name text, that last name
-- RETURNS ok now names watched: now is the server's time in ms, names are names and the ms at which they were noted, in turn,
--   watched is 1 if a program reads snapshots of the mesh, else 0
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_queues()
  local mesh = KEYS[1]
  local limit, after_noted, after_name = tonumber(ARGV[1]), ARGV[2], ARGV[3]
  local queues, watched = mesh .. ':queues', mesh .. ':watched'

  local from = 0
  if after_noted ~= '' then
    if redis.call('ZSCORE', queues, after_name) == after_noted then
      from = redis.call('ZREVRANK', queues, after_name) + 1
    else -- it was noted again, or forgotten: begin with all that were noted in the same millisecond
      from = redis.call('ZCOUNT', queues, '(' .. after_noted, '+inf')
    end
  end
  local names = redis.call('ZREVRANGE', queues, from, from + limit - 1, 'WITHSCORES')
  return {'ok', now_ms(), names, redis.call('EXISTS', watched)}
end

-- note_queues: notes that queues are in use now, so that scans and lists find their names.
-- ARGV[1] queues_expire_s s
-- ARGV[2..] names text
-- RETURNS ok
-- RESEND safe: a copy notes the same names again, with a later time
local function note_queues()
  local mesh = KEYS[1]
  local queues_expire_s = ARGV[1]
  local queues = mesh .. ':queues'

  local now = now_ms()
  for i = 2, #ARGV do
    local name = ARGV[i]
    redis.call('ZADD', queues, now, name)
  end
  redis.call('EXPIRE', queues, queues_expire_s)
  return {'ok'}
end

-- forget_queues: deletes the names of queues that were found empty. A name stays if it was noted lately, or if a dead worker in
-- recovery served the queue: its tasks may be given back there. Live workers note the queues that they serve.
-- ARGV[1] unused_ms ms for which a name must not have been noted
-- ARGV[2] limit dead workers in recovery above which nothing is deleted
-- ARGV[3..] names text, at most 100
-- RETURNS ok name... (those that are no longer known) | busy (too many dead workers are in recovery)
-- RESEND safe: a name that was noted meanwhile stays
-- FLAGS allow-oom
local function forget_queues()
  local mesh = KEYS[1]
  local unused_ms, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
  local queues, dying = mesh .. ':queues', mesh .. ':Dying'

  if redis.call('SCARD', dying) > limit then
    return {'busy'}
  end
  local latest, unused, served, reply = now_ms() - unused_ms, {}, {}, {'ok'}
  for i = 3, #ARGV do
    local name = ARGV[i]
    local noted = redis.call('ZSCORE', queues, name)
    if not noted or tonumber(noted) <= latest then
      unused[#unused + 1] = name
    end
  end
  for _, worker in ipairs(#unused > 0 and redis.call('SMEMBERS', dying) or {}) do
    for n, mapped in ipairs(redis.call('SMISMEMBER', mesh .. ':WorkMap:' .. worker, unpack(unused))) do
      served[n] = served[n] or mapped == 1
    end
  end
  for n, name in ipairs(unused) do
    if not served[n] then
      redis.call('ZREM', queues, name)
      reply[#reply + 1] = name
    end
  end
  return reply
end

-- declare_shards: stores how many shards queues have, unless it is stored already: the first declaration decides.
-- ARGV[4..] queues name and declared number of shards, in turn
-- RETURNS ok stored...: the number that each of them has now | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not note what was dropped
-- NUMBERED
-- FLAGS allow-oom
local function declare_shards()
  local mesh = KEYS[1]
  local shards = mesh .. ':shards'

  redis.call('HLEN', shards)
  local reply = {'ok'}
  for i = 4, #ARGV, 2 do
    local queue, declared = ARGV[i], ARGV[i + 1]
    redis.call('HSETNX', shards, queue, declared)
    reply[#reply + 1] = redis.call('HGET', shards, queue)
  end
  return reply
end

-- list_shards: returns the queues that have several shards, and how many; refuses a mesh of another wire version.
-- ARGV[1] wire_version whole number
-- RETURNS ok name number...: in turn | version found
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_shards()
  local mesh = KEYS[1]
  local wire_version = ARGV[1]
  local shards, version = mesh .. ':shards', mesh .. ':version'

  local found = redis.call('GET', version)
  if found and found ~= wire_version then
    return {'version', found}
  end
  local reply = own(redis.pcall('HGETALL', shards)) or {}
  table.insert(reply, 1, 'ok')
  return reply
end

-- drop_shards: deletes the stored number of shards of a queue, if it is the number that the caller knows.
-- ARGV[4] queue name
-- ARGV[5] known number of shards
-- RETURNS ok | changed (it has another number, or none) | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not drop what was declared since
-- NUMBERED
-- FLAGS allow-oom
local function drop_shards()
  local mesh = KEYS[1]
  local queue, known = ARGV[4], ARGV[5]
  local shards = mesh .. ':shards'

  if redis.call('HGET', shards, queue) ~= known then
    return {'changed'}
  end
  redis.call('HDEL', shards, queue)
  return {'ok'}
end

local OUTBOXES_EXPIRE = 2592000

-- lease_outbox: takes or renews the lease of one outbox, whose holder alone sweeps its table, and stores what it says of the table.
-- Gives the lease back if it asks for 0 ms. What another program has written there counts as nothing. Forgets other outboxes that
-- no worker has leased for 30 days.
-- ARGV[1] outbox the random id that its table has, and what names the queues of those who sweep it for some only
-- ARGV[2] holder text of ASCII letters and digits, which the program has drawn
-- ARGV[3] lease_ms ms
-- ARGV[4] facts JSON about the table, '' to keep those that are stored
-- RETURNS ok facts | held facts
-- RESEND safe: it sets what it set
-- FLAGS allow-oom
local function lease_outbox()
  local mesh = KEYS[1]
  local outbox, holder, lease_ms, facts = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
  local outboxes, now = mesh .. ':outboxes', now_ms()

  local found, till, known = string.match(redis.call('HGET', outboxes, outbox) or '', '^(%w+) (%d+) (.*)$')
  till = whole_number(till, 0, LATEST)
  if found and found ~= holder and till > now and till <= now + 60000 then -- beyond that, the clock was set back
    return {'held', known}
  end
  local stored = redis.call('HRANDFIELD', outboxes, 10, 'WITHVALUES') -- all are met in time
  for i = 1, #stored, 2 do
    local ended = whole_number(string.match(stored[i + 1], '^%w+ (%d+) '), 0)
    if ended < now - OUTBOXES_EXPIRE * 1000 and stored[i] ~= outbox then
      redis.call('HDEL', outboxes, stored[i])
    end
  end
  facts = facts ~= '' and facts or known or ''
  redis.call('HSET', outboxes, outbox, holder .. ' ' .. digits(now + lease_ms) .. ' ' .. facts)
  redis.call('EXPIRE', outboxes, OUTBOXES_EXPIRE)
  return {'ok', facts}
end

-- list_outboxes: what the workers that sweep outboxes say of their tables.
-- RETURNS ok now then outbox facts age in turn: now ms since 1970; age ms since the lease ended, 0 while a worker holds it
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_outboxes()
  local mesh = KEYS[1]

  local now = now_ms()
  local reply, stored = {'ok', digits(now)}, own(redis.pcall('HGETALL', mesh .. ':outboxes')) or {}
  for i = 1, #stored, 2 do
    local _, till, facts = string.match(stored[i + 1], '^(%w+) (%d+) (.*)$')
    if facts then
      reply[#reply + 1], reply[#reply + 2], reply[#reply + 3] = stored[i], facts, math.max(0, now - whole_number(till, 0, LATEST))
    end
  end
  return reply
end

local LIMITS_EXPIRE = 2592000

-- note_limit: notes that a program uses a named limit, so that it is listed for 30 days. Forgets those that were not.
-- ARGV[1] name of the limit
-- ARGV[2] unit of what its rate counts; empty: calls
-- RETURNS ok
-- RESEND safe: it sets what it set
-- FLAGS allow-oom
local function note_limit()
  local mesh = KEYS[1]
  local name, unit = ARGV[1], ARGV[2]
  local limits, now = mesh .. ':limits', now_ms()

  local stored = redis.call('HRANDFIELD', limits, 10, 'WITHVALUES') -- all are met in time
  for i = 1, #stored, 2 do
    local noted = whole_number(string.match(stored[i + 1], '^(%d+) '), 0)
    if noted < now - LIMITS_EXPIRE * 1000 then
      redis.call('HDEL', limits, stored[i])
    end
  end
  redis.call('HSET', limits, name, digits(now) .. ' ' .. unit)
  redis.call('EXPIRE', limits, LIMITS_EXPIRE)
  return {'ok'}
end

-- list_limits: the named limits that programs of the mesh have used in the last 30 days.
-- RETURNS ok then name unit in turn
-- RESEND safe: it only reads
-- FLAGS no-writes
local function list_limits()
  local mesh = KEYS[1]

  local reply, stored, now = {'ok'}, own(redis.pcall('HGETALL', mesh .. ':limits')) or {}, now_ms()
  for i = 1, #stored, 2 do
    local noted, unit = string.match(stored[i + 1], '^(%d+) (.*)$')
    if noted and whole_number(noted, 0) >= now - LIMITS_EXPIRE * 1000 then
      reply[#reply + 1], reply[#reply + 2] = stored[i], unit
    end
  end
  return reply
end

-- Deploys: a declared schedule, and a pattern of a subscription, has an owner: the application that declared it last, and the highest
-- deploy of it that has declared it, as NUMBER APP. It is outdated when the registered workers of that application all have higher
-- numbers. A worker registers before it declares, so it keeps what it declares. One without a number keeps all of its application.

-- Returns the owner of what has the owner `before` (nil: none), and is declared by `owner` now: number 0 is a worker without one.
local function owner_after(before, owner)
  local number, app = string.match(before or '', '^(%d+) (.*)$')
  local mine, of = string.match(owner, '^(%d+) (.*)$')
  if app == of and tonumber(number) >= tonumber(mine) then
    return before
  end
  return mine ~= '0' and owner or nil
end

-- Returns the lowest and the highest deploy of the registered workers of each application, in two tables; nil if that is not known of
-- one of them.
local function running_deploys(mesh)
  local lowest, highest = {}, {}
  for _, worker in ipairs(own(redis.pcall('SMEMBERS', mesh .. ':Workers')) or {}) do
    local kept = own(redis.pcall('HMGET', mesh .. ':info:' .. worker, 'app', 'deploy'))
    if not kept or not kept[1] then
      return nil
    end
    local app, deploy = kept[1], whole_number(kept[2], 0)
    lowest[app], highest[app] = math.min(lowest[app] or deploy, deploy), math.max(highest[app] or 0, deploy)
  end
  return lowest, highest
end

-- True if the `owner` is outdated; `lowest`: the lowest deploys that run.
local function is_outdated(owner, lowest)
  local number, app = string.match(owner or '', '^(%d+) (.*)$')
  return app and lowest[app] and whole_number(number, 0) < lowest[app]
end

-- declare_topics: a worker subscribes one queue to topics, or says again that it is. Patterns that no worker has declared for
-- `unseen_ms` are dropped, but only now that a worker declares others: without workers, a subscription stays.
-- ARGV[4] queue name
-- ARGV[5] facts JSON in one line: how an event becomes a job of the queue
-- ARGV[6] unseen_ms ms
-- ARGV[7] owner the deploy of the worker, 0 for none, and its application
-- ARGV[8..] patterns texts
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not declare what was dropped
-- NUMBERED
-- FLAGS allow-oom
local function declare_topics()
  local mesh = KEYS[1]
  local queue, facts, unseen_ms, owner = ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]
  local topics, now = mesh .. ':topics', now_ms()

  local lines, before, kept = {facts}, {}, {}
  for seen, pattern, of in string.gmatch(redis.call('HGET', topics, queue) or '', '\n(%d+) ([^ \n]+) ?([^\n]*)') do
    seen = math.min(now, whole_number(seen, 0, LATEST)) -- a later time is from before the clock was set back
    before[pattern] = of
    kept[pattern] = now - seen < unseen_ms and digits(seen) .. ' ' .. pattern .. (of ~= '' and ' ' .. of or '') or nil
  end
  for i = 8, #ARGV do
    local pattern = ARGV[i]
    local of = owner_after(before[pattern], owner)
    lines[#lines + 1], kept[pattern] = digits(now) .. ' ' .. pattern .. (of and ' ' .. of or ''), nil
  end
  for _, line in pairs(kept) do
    lines[#lines + 1] = line
  end
  redis.call('HSET', topics, queue, table.concat(lines, '\n'))
  return {'ok'}
end

-- read_topics: the subscriptions of all queues, as they are stored.
-- RETURNS ok now then queue subscription in turn: now ms since 1970; a subscription is the facts, and a line for each pattern
-- RESEND safe: it only reads
-- FLAGS no-writes
local function read_topics()
  local mesh = KEYS[1]

  local reply = redis.call('HGETALL', mesh .. ':topics')
  table.insert(reply, 1, digits(now_ms()))
  table.insert(reply, 1, 'ok')
  return reply
end

-- drop_topics: ends the subscription of a queue. A worker that still has its handler declares it again.
-- ARGV[4] queue name
-- RETURNS ok | unknown | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not drop what was declared since
-- NUMBERED
-- FLAGS allow-oom
local function drop_topics()
  local mesh = KEYS[1]
  local queue = ARGV[4]
  local topics = mesh .. ':topics'

  return {redis.call('HDEL', topics, queue) == 1 and 'ok' or 'unknown'}
end

-- drop_outdated_topics: drops the patterns of subscriptions whose owner is outdated. A queue without patterns is not subscribed any
-- more; the tasks that it has stay.
-- RETURNS ok left dropped: the queues that are not subscribed any more, and a pair of queue and pattern for each pattern
-- RESEND safe: a copy finds none of them
-- FLAGS allow-oom
local function drop_outdated_topics()
  local mesh = KEYS[1]
  local topics = mesh .. ':topics'

  local lowest, dropped, left = running_deploys(mesh), {}, {}
  local stored = redis.call('HGETALL', topics)
  for i = 1, lowest and #stored or 0, 2 do
    local queue, lines, gone = stored[i], {}, {}
    local facts, rest = string.match(stored[i + 1], '^([^\n]*)(.*)$')
    for line in string.gmatch(rest, '[^\n]+') do
      local pattern, of = string.match(line, '^%d+ ([^ ]+) (.*)$')
      local list = is_outdated(of, lowest) and gone or lines
      list[#list + 1] = list == gone and pattern or line
    end
    if #gone > 0 and #lines > 0 then
      redis.call('HSET', topics, queue, facts .. '\n' .. table.concat(lines, '\n'))
    elseif #gone > 0 then
      redis.call('HDEL', topics, queue)
      left[#left + 1] = queue
    end
    for _, pattern in ipairs(gone) do
      dropped[#dropped + 1] = {queue, pattern}
    end
  end
  return {'ok', left, dropped}
end
