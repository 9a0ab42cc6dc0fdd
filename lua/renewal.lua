-- Makes one node the one that renews leases from the parent. Mirrors nothing in the domain:
-- the embedded store has one node.
--
-- Atomic, so that of two nodes that find nobody there only one goes on.
--
-- KEYS[1]  the node that renews
-- ARGV[1]  this node's id
-- ARGV[2]  milliseconds after which another may take over
--
-- Reply: 1 if it is this node, 0 if it is another; 2 if it is this node, and what was there was
-- not written by any.

-- No node's turn takes longer than an hour, in milliseconds.
local LONGEST = 3600000

local node, strange = false, ...
-- What is no text at all fails here: see lua/guard.lua.
if not strange then node = redis.call('GET', KEYS[1]) end
if node and node ~= ARGV[1] then
  local left = redis.call('PTTL', KEYS[1])
  if left >= 0 and left <= LONGEST then return 0 end
  strange = true
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return strange and 2 or 1
