-- A number in digits, clamped to what Python accepts as a time and the server accepts as an expiry.
local function is_digits(value)
  return type(value) == 'string' and #value <= 15 and string.find(value, '^%d+$') ~= nil
end

local function is_utf8(text)
  if not string.find(text, '[\128-\255]') then
    return true
  end
  if string.find(text, '\224[\128-\159]') or string.find(text, '\237[\160-\191]')
    or string.find(text, '\240[\128-\143]') or string.find(text, '\244[\144-\191]') then
    return false
  end
  text = string.gsub(text, '[\240-\244][\128-\191][\128-\191][\128-\191]', ' ')
  text = string.gsub(text, '[\224-\239][\128-\191][\128-\191]', ' ')
  text = string.gsub(text, '[\194-\223][\128-\191]', ' ')
  return not string.find(text, '[\128-\255]')
end
