-- Follows the text of throttle.lua and holds.lua, which defines `run`, and guard.lua. Runs the script for each
-- part of a call: what many requests ask for at the same time. A request costs less so than by a call of its own.
--
-- KEYS     the keys of the first part, of the second, and so on
-- ARGV[1]  for each part a byte: how many keys it has
-- ARGV[…]  the arguments of the first part, of the second, and so on: as many for each; then the keys that are
--          not declared
--
-- `run` gets the keys, and the index of the first one of its part; the same of the arguments; and the time of the
-- server in µs. (A table with those of its part would take longer than a command.)
-- Reply: of each part. One that fails has an error for its reply, and changes nothing for the others.

local counts, keys = ARGV[1], KEYS
local parts, needed = #counts, 0
for part = 1, parts do needed = needed + string.byte(counts, part) end
local args = (#ARGV - 1 - (needed - #KEYS)) / parts
if needed > #KEYS then
  keys = { unpack(KEYS) }
  for at = #ARGV - (needed - #KEYS) + 1, #ARGV do keys[#keys + 1] = ARGV[at] end
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local replies, key, arg = {}, 1, 2
for part = 1, parts do
  replies[part] = guarded(keys, key, ARGV, arg, now)
  key, arg = key + string.byte(counts, part), arg + args
end
return replies
