-- What the server gives its scripts: Lua 5.1 without io and os, and these globals.
std = "lua51"
read_globals = { "redis", "KEYS", "ARGV", "cjson", "cmsgpack", "bit", "struct" }
max_line_length = 200 -- constants are literals here, which are longer than their names
max_comment_line_length = 128
