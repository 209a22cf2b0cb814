#!lua flags=allow-oom
-- report_part: what a part of another queue reports to the home of its batch. If all parts have closed, the batch ends.
-- KEYS[1] queue LIST
-- KEYS[2] batch HASH
-- KEYS[3] batches ZSET
-- ARGV[1] id of the batch
-- ARGV[2] token of the batch
-- ARGV[3] part base of its queue
-- ARGV[4] version of the part
-- ARGV[5] closed 1: no member is left
-- ARGV[6] counts added, finished, failed, cancelled, lost, failures; with spaces
-- RETURNS ok
-- RESEND safe: of two reports, the one with the lower version changes nothing; so does one of the same version after it closed
local queue, batch, batches = KEYS[1], KEYS[2], KEYS[3]
local id, token, part, version, closed, counts = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1', ARGV[6]

check_types(queue)
if not (is_line(part) and is_digits(version) and is_counts(counts)) then
  return redis.error_reply('ERR the part, the version and the counts of a report cannot be that')
end
redis.call('ZCARD', batches)
redis.call('HLEN', batch)
redis.call('HLEN', batch .. ':parts')
local ready = take_report(queue, id, token, {part = part, v = tonumber(version), closed = closed, counts = counts})
wake(queue, ready + count_members(queue))
return {'ok'}
