-- Stores a job whose id runs. Keeps what its dispatch would have changed, in case that run is retried instead of ending.
-- LATER: most calls of the scripts do not need it.
local function block(base, id, o, fields, asked)
  local lower, upper = bounds_of(o.when, asked)
  fields.state, fields.update_low, fields.update_high = 'blocked', digits(lower), digits(upper)
  fields.update_data, fields.update_policy = o.data ~= false and '1' or nil, forced_names(o, '')
  fields.update_counts = resets_counts(o) and '1' or nil
  write_hash(base .. ':job:' .. id, fields)
  redis.call('SADD', base .. ':blocked', id)
  tell(base, id, 'blocked')
  return 'blocked', 0
end
