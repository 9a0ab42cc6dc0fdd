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
-- ARGV[5]  the key that has the resources that somebody holds a lease on, which is looked at only
--
-- Reply: how many nodes are alive, and the birth as text; and, only if there were any, how many of
-- these three were replaced or removed, or had something taken out, that no node can have written.

-- No clock that steps back makes a birth seem to come by more than this, in µs: an hour.
local AHEAD = 3600000000

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ttl, strange = tonumber(ARGV[2]), nil
-- What is called so is no sorted set: see lua/guard.lua.
if ... then
  redis.call('DEL', KEYS[1])
  strange = 1
end

local birth = redis.pcall('GET', ARGV[3])
-- One of another type is as good as no number; all else is for the node to hear of.
if type(birth) == 'table' then
  if not string.find(birth.err, '^WRONGTYPE ') then error(birth.err, 0) end
  birth = ''
end
local born = birth and string.find(birth, '^%d+$') and tonumber(birth) or 0
if born > now + AHEAD then born = 0 end

if ttl == 0 then
  redis.call('ZREM', KEYS[1], ARGV[1])
else
  redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
  local inherited = tonumber(ARGV[4])
  if birth and born == 0 then strange = (strange or 0) + 1 end
  if born == 0 or born < inherited then
    born = inherited > 0 and inherited or now
    redis.call('SET', ARGV[3], string.format('%.0f', born))
  end
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - ttl))
  -- Who was heard of later than now would count for too long.
  local late = string.format('(%.0f', now + ttl)
  if redis.call('ZREMRANGEBYSCORE', KEYS[1], late, '+inf') > 0 then
    strange = (strange or 0) + 1
  end
  -- Otherwise nobody could list the resources until the next new one.
  local listed = redis.pcall('ZCARD', ARGV[5])
  if type(listed) == 'table' and string.find(listed.err, '^WRONGTYPE ') then
    redis.call('DEL', ARGV[5])
    strange = (strange or 0) + 1
  end
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.ceil(ttl / 1000)))
end
return { redis.call('ZCARD', KEYS[1]), string.format('%.0f', born), strange }
