-- The fields of a record that a dispatch may give, and that otherwise the handler's options decide.
local POLICY = {'max_failures', 'max_stalls', 'max_timeouts', 'min_backoff', 'max_backoff', 'jitter', 'retry_on',
  'fail_on', 'timeout', 'result_ttl'}
