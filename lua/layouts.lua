-- Records the layouts in which a node stores states: the limits by which they expire. Replies for
-- how long states in another layout may still exist. Mirrors nothing in the domain: the embedded
-- store has the states of one node only.
--
-- Atomic, so that of two nodes with different limits at least one learns of the other.
--
-- KEYS[1]  the layouts: a hash. Field: a hash of the bucket (8 bytes). Value: a hash of the layout
--          (8 bytes), the longest life of a state, and the time until which states in another
--          layout may exist (two doubles, µs). Field 'f': a time in µs. Until then the store is
--          newer than any state, so an unrecorded bucket has none.
-- ARGV[1]  the birth of the oldest server of the store, in µs since the epoch; 0: unknown
-- ARGV[2]  the layouts of a node: 8 bytes, 8 bytes and a double each, as above
--
-- Reply: a packed double for each: the remaining time in µs. If corrupt values were replaced, one
-- more: their number.

-- In µs: within this time after its birth, a store has only states in recorded layouts.
local NEWBORN = 30000000
-- In seconds. A layout whose record has expired counts as changed.
local KEPT = 2592000
-- The longest life of a state, in µs: 30 years. A larger value is corrupt.
local LONGEST = 1000000000000000

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local born, strange = tonumber(ARGV[1]), 0
-- The key is not a hash: see lua/guard.lua.
if ... then
  redis.call('DEL', KEYS[1])
  strange = 1
end

local fresh = redis.call('HGET', KEYS[1], 'f')
if fresh then
  local ends = string.find(fresh, '^%d+$') and tonumber(fresh) or math.huge
  fresh = ends > now
  if ends > now + LONGEST then
    redis.call('HDEL', KEYS[1], 'f')
    fresh, strange = false, strange + 1
  end
elseif redis.call('EXISTS', KEYS[1]) == 0 and born > 0 and now - born < NEWBORN then
  fresh = true
  redis.call('HSET', KEYS[1], 'f', string.format('%.0f', born + NEWBORN))
end

local left = {}
for at = 1, #ARGV[2], 24 do
  local bucket, settings = string.sub(ARGV[2], at, at + 7), string.sub(ARGV[2], at + 8, at + 15)
  local life = struct.unpack('<d', ARGV[2], at + 16)
  local known = redis.call('HGET', KEYS[1], bucket)
  local ends = fresh and 0 or now + life
  if known then
    local old_life, old_ends = -1, 0
    if #known == 24 then old_life, old_ends = struct.unpack('<dd', known, 9) end
    if not (old_life >= 0 and old_life <= LONGEST and old_ends <= now + LONGEST) then
      strange = strange + 1
    elseif string.sub(known, 1, 8) ~= settings then
      ends = math.max(old_ends, now + math.max(life, old_life))
    else
      ends = old_ends
    end
  end
  redis.call('HSET', KEYS[1], bucket, settings .. struct.pack('<dd', life, ends))
  left[#left + 1] = struct.pack('<d', math.max(ends - now, 0))
end
redis.call('EXPIRE', KEYS[1], KEPT)
if strange > 0 then left[#left + 1] = struct.pack('<d', strange) end
return table.concat(left)
