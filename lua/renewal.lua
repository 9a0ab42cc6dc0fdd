-- Makes one node the one that renews leases from the parent. Mirrors nothing in the domain:
-- the embedded store has one node.
--
-- Atomic, so that of two nodes that find nobody there only one goes on.
--
-- KEYS[1]  the node that renews
-- ARGV[1]  this node's id
-- ARGV[2]  milliseconds after which another may take over
--
-- Reply: 1 if it is this node, 0 if it is another.

local node = redis.call('GET', KEYS[1])
if node and node ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
