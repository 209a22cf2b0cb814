-- The tries of a task that did not end well: when, for how long, on which worker, and why. People read them; no script decides
-- by them.

local MOST_TRIES = 10
local TRIES_BYTES = 8192

-- Returns the first 500 bytes of a text, without a character that the cut would split.
local function truncated(text)
  return #text <= 500 and text or (string.gsub(string.sub(text, 1, 500), '[\192-\255][\128-\191]*$', ''))
end

-- Returns the field `tries` of a record with one more try: that of `claim` of `worker`, which ends now. It has the last
-- MOST_TRIES, fewer if they would take more than TRIES_BYTES. `kept`: the field so far (nil: none). `why`: failed, retry (it
-- was not counted), timeout, stalled or broken.
local function add_try(kept, claim, now, worker, why, error_type, error_message)
  local read, earlier = pcall(cmsgpack.unpack, kept or '\144')
  local tries = {}
  if read and type(earlier) == 'table' then -- another application may have written anything
    for i = math.max(1, #earlier - MOST_TRIES + 2), #earlier do
      tries[#tries + 1] = earlier[i]
    end
  end
  local ms = math.max(0, now - math.floor(tonumber(claim) / 1000))
  tries[#tries + 1] = {now, ms, worker, why, truncated(error_type), truncated(error_message)}
  local packed = cmsgpack.pack(tries)
  while #packed > TRIES_BYTES and #tries > 1 do
    table.remove(tries, 1)
    packed = cmsgpack.pack(tries)
  end
  return packed
end
