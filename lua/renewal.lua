-- Makes one node the one that renews leases from the parent. Mirrors nothing in the domain:
-- the embedded store has one node.
--
-- Atomic, so that only one of two nodes becomes the one that renews.
--
-- KEYS[1]  the id of the node that renews
-- ARGV[1]  this node's id
-- ARGV[2]  ms after which another node may take over
--
-- Reply: 1 if this node renews, 0 if another does; 2 if this node renews, and the key was corrupt.

-- The longest time until another node may take over, in ms: an hour. A longer one is corrupt.
local LONGEST = 3600000

local node, strange = false, ...
-- Fails if the key is not a string: see lua/guard.lua.
if not strange then node = redis.call('GET', KEYS[1]) end
if node and node ~= ARGV[1] then
  local left = redis.call('PTTL', KEYS[1])
  if left >= 0 and left <= LONGEST then return 0 end
  strange = true
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return strange and 2 or 1
