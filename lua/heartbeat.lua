-- Registers a live node with what it says of itself, forgets the nodes that died an hour ago, and counts
-- the live ones. Mirrors nothing in the domain: the embedded store has one node. The first heartbeat also
-- records the birth of the store: no node decides before its first heartbeat.
--
-- Atomic, so that the count is of one moment.
--
-- KEYS[1]  the nodes: a sorted set of their ids by the time of their last heartbeat, in µs
-- KEYS[2]  their reports: a hash by id
-- ARGV[1]  this node's id
-- ARGV[2]  µs after the last heartbeat at which a node no longer counts; 0: this node is leaving
-- ARGV[3]  the key of the birth: since when this store has had its state, in µs. Not in KEYS, because
--          it may have another hash tag than KEYS[1].
-- ARGV[4]  the birth under the server's former key, in µs, if the key has changed because the server
--          has given away a slot; 0: no former key. Of two births the later one counts; without
--          any, the birth is now.
-- ARGV[5]  the key of the register of resources; deleted if it is not a sorted set
-- ARGV[6]  this node's report; empty: it has none yet
--
-- Reply: the number of live nodes; the birth as text, 0 if it is unknown; and, unless it is 0, how
-- many of the nodes, the birth and the register of resources had a corrupt value, now replaced.

-- A birth further in the future than this, in µs, is corrupt: a clock steps back by less.
local AHEAD = 3600000000
-- How long, in µs, a node that died is known.
local KEPT = 3600000000
-- The most nodes that a call forgets.
local FORGOTTEN = 100

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ttl, strange = tonumber(ARGV[2]), nil
-- A key has another type: see lua/guard.lua.
if ... then
  redis.call('DEL', KEYS[1], KEYS[2])
  strange = 1
end

local birth = redis.pcall('GET', ARGV[3])
-- A value of another type counts as corrupt. Other errors go to the node.
if type(birth) == 'table' then
  if not string.find(birth.err, '^WRONGTYPE ') then error(birth.err, 0) end
  birth = ''
end
local born = birth and string.find(birth, '^%d+$') and tonumber(birth) or 0
if born > now + AHEAD then born = 0 end

if ttl == 0 then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
else
  redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
  if ARGV[6] ~= '' then redis.call('HSET', KEYS[2], ARGV[1], ARGV[6]) end
  local inherited = tonumber(ARGV[4])
  if birth and born == 0 then strange = (strange or 0) + 1 end
  if born == 0 or born < inherited then
    born = inherited > 0 and inherited or now
    redis.call('SET', ARGV[3], string.format('%.0f', born))
  end
  local long_dead = string.format('%.0f', now - KEPT)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', long_dead, 'LIMIT', '0', FORGOTTEN)) do
    redis.call('ZREM', KEYS[1], id)
    redis.call('HDEL', KEYS[2], id)
  end
  -- A later time would keep a dead node alive for more than twice the time in ARGV[2].
  local late = string.format('(%.0f', now + ttl)
  if redis.call('ZREMRANGEBYSCORE', KEYS[1], late, '+inf') > 0 then
    -- Those of live nodes are soon there again.
    redis.call('DEL', KEYS[2])
    strange = (strange or 0) + 1
  end
  -- Otherwise the resources could not be listed until the next new one.
  local listed = redis.pcall('ZCARD', ARGV[5])
  if type(listed) == 'table' and string.find(listed.err, '^WRONGTYPE ') then
    redis.call('DEL', ARGV[5])
    strange = (strange or 0) + 1
  end
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, KEPT / 1000) end
end
local last_dead = string.format('(%.0f', now - ttl)
return { redis.call('ZCOUNT', KEYS[1], last_dead, '+inf'), string.format('%.0f', born), strange }
