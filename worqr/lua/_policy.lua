-- The record fields that a dispatch may set; the handler's options supply the others.
local POLICY = {'max_failures', 'max_stalls', 'max_timeouts', 'min_backoff', 'max_backoff', 'jitter', 'retry_on',
  'fail_on', 'timeout', 'result_ttl'}
