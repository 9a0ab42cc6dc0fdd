-- Tells for how long states may still be about that were stored in another way than today:
-- under other keys, or to expire by other limits. Mirrors nothing in the domain: the embedded
-- store forgets with its node.
--
-- Atomic, so that of two nodes with different limits each hears of the other.
--
-- KEYS[1]  the layouts: a hash from what they are of (8 bytes) to what they are (8 bytes), the
--          longest life of a state in µs and until when older states may be about, in µs (two
--          doubles). The field 'f' says until when what is not there was never in use, either.
-- ARGV[1]  when the oldest server of the store was born, in µs since the epoch; 0: not known
-- ARGV[2]  the layouts of a node: 8 bytes, 8 bytes and a double each, as above
--
-- Reply: a packed double for each: for how many µs still; and one more, only if it is not 0: how
-- many values were replaced that no node can have written.

-- A store so young has no states of which nobody has told, in µs.
local NEWBORN = 30000000
-- In seconds; what is forgotten counts as changed.
local KEPT = 2592000
-- No life is longer than this, in µs, nor does one end later: 30 years.
local LONGEST = 1000000000000000

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local born, strange = tonumber(ARGV[1]), 0
-- What is called so is no hash: see lua/guard.lua.
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
  local of, is = string.sub(ARGV[2], at, at + 7), string.sub(ARGV[2], at + 8, at + 15)
  local life = struct.unpack('<d', ARGV[2], at + 16)
  local known = redis.call('HGET', KEYS[1], of)
  local ends = fresh and 0 or now + life
  if known then
    local old_life, old_ends = -1, 0
    if #known == 24 then old_life, old_ends = struct.unpack('<dd', known, 9) end
    if not (old_life >= 0 and old_life <= LONGEST and old_ends <= now + LONGEST) then
      strange = strange + 1
    elseif string.sub(known, 1, 8) ~= is then
      ends = math.max(old_ends, now + math.max(life, old_life))
    else
      ends = old_ends
    end
  end
  redis.call('HSET', KEYS[1], of, is .. struct.pack('<dd', life, ends))
  left[#left + 1] = struct.pack('<d', math.max(ends - now, 0))
end
redis.call('EXPIRE', KEYS[1], KEPT)
if strange > 0 then left[#left + 1] = struct.pack('<d', strange) end
return table.concat(left)
