#!lua
-- note_event: appends an entry to the log of the mesh.
-- KEYS[1] producer HASH
-- KEYS[2] log STREAM
-- ARGV[1] number of the request
-- ARGV[2] lowest number still unanswered
-- ARGV[3] kind word
-- ARGV[4] who text, the person or program that did it
-- ARGV[5] queue name, or ''
-- ARGV[6] worker id, or ''
-- ARGV[7] job id, or ''
-- ARGV[8] n how many tasks it was about, or ''
-- ARGV[9] text for people
-- RETURNS ok | late
-- RESEND safe: the reply is stored under the producer's number; a late copy must not append it twice
-- NUMBERED
local log = KEYS[2]
local kind, who, queue, worker, job, n, text = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]

add_to_log(log, kind, who, queue, worker, job, n, text)
return {'ok'}
