-- What the server gives its scripts: Lua 5.1 without io and os, and these globals.
std = "lua51"
read_globals = { "redis", "KEYS", "ARGV", "cjson", "cmsgpack", "bit", "struct" }
max_line_length = 240 -- constants are literals here, which are longer than their names
max_comment_line_length = 128
ignore = { "4../shared", "43./name", "21./shared" } -- the frame that makes functions at first need names its arguments so
