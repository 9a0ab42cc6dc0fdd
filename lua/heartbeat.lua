-- Records that a node is alive, drops those that have not been heard of for a while, and
-- counts the rest. Mirrors nothing in the domain: the embedded store has one node. The first
-- one ever also notes when the store was born: no decision comes before it.
--
-- Atomic so that the count is of one moment.
--
-- KEYS[1]  the nodes: a sorted set of their ids by the time they were last heard of, in µs
-- ARGV[1]  this node's id
-- ARGV[2]  microseconds after which a silent node counts no more; 0: this node is leaving
-- ARGV[3]  the key that has the birth: since when this store has had its state, in
--          microseconds. It need not share a hash tag with KEYS[1], and is no key of KEYS.
-- ARGV[4]  when the store was born, in microseconds, if that key is new only because the server
--          has given away the slot of the one before, or has got another's with a key of its own:
--          the later one counts; 0: then the birth is now
--
-- Reply: how many nodes are alive, and the birth as text.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ttl = tonumber(ARGV[2])

if ttl == 0 then
  redis.call('ZREM', KEYS[1], ARGV[1])
else
  local birth, inherited = tonumber(redis.call('GET', ARGV[3]) or nil), tonumber(ARGV[4])
  if not birth or birth < inherited then
    redis.call('SET', ARGV[3], string.format('%.0f', inherited > 0 and inherited or now))
  end
  redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - ttl))
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.ceil(ttl / 1000)))
end
return { redis.call('ZCARD', KEYS[1]), redis.call('GET', ARGV[3]) or '0' }
