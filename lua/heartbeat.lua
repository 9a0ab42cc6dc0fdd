-- Registers a live node with its report, which is what it says of itself; removes the nodes without a
-- recent heartbeat, and counts the rest. Mirrors nothing in the domain: the embedded store has one node.
-- The first heartbeat also records the birth of the store: no node decides before its first heartbeat.
--
-- Atomic, so that the count is of one moment.
--
-- KEYS[1]  the nodes: a sorted set of their ids by the time of their last heartbeat, in µs
-- ARGV[1]  this node's id
-- ARGV[2]  µs after the last heartbeat at which a node no longer counts; 0: this node is leaving
-- ARGV[3]  the key of the birth: since when this store has had its state, in µs. Not in KEYS, because
--          it may have another hash tag than KEYS[1].
-- ARGV[4]  the birth under the server's former key, in µs, if the key has changed because the server
--          has given away a slot; 0: no former key. Of two births the later one counts; without
--          any, the birth is now.
-- ARGV[5]  the key of the register of resources; deleted if it is not a sorted set
-- ARGV[6]  the key of the reports: a hash by id, each after the time of its heartbeat in µs and a space.
--          Those of nodes that have died stay, until there are too many.
-- ARGV[7]  this node's report; empty: it has none yet, or it is too long
--
-- Reply: the number of live nodes; the birth as text, 0 if it is unknown; and, unless it is 0, how
-- many of the nodes, the reports, the birth and the register of resources had a corrupt value, now
-- replaced.

-- A birth further in the future than this, in µs, is corrupt: a clock steps back by less.
local AHEAD = 3600000000
-- How long reports are kept, in ms, if there is no heartbeat.
local KEPT = 3600000
-- The most reports of dead nodes.
local MOST_DEAD = 100

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ttl, strange = tonumber(ARGV[2]), nil
-- The key is not a sorted set: see lua/guard.lua.
if ... then
  redis.call('DEL', KEYS[1])
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
  redis.pcall('HDEL', ARGV[6], ARGV[1])
else
  redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
  local inherited = tonumber(ARGV[4])
  if birth and born == 0 then strange = (strange or 0) + 1 end
  if born == 0 or born < inherited then
    born = inherited > 0 and inherited or now
    redis.call('SET', ARGV[3], string.format('%.0f', born))
  end
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - ttl))
  -- A later time would keep a dead node alive for more than twice the time in ARGV[2].
  local late = string.format('(%.0f', now + ttl)
  if redis.call('ZREMRANGEBYSCORE', KEYS[1], late, '+inf') > 0 then
    strange = (strange or 0) + 1
  end
  -- Otherwise the resources could not be listed until the next new one.
  local listed = redis.pcall('ZCARD', ARGV[5])
  if type(listed) == 'table' and string.find(listed.err, '^WRONGTYPE ') then
    redis.call('DEL', ARGV[5])
    strange = (strange or 0) + 1
  end
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.ceil(ttl / 1000)))
  local reports = redis.pcall('HLEN', ARGV[6])
  if type(reports) == 'table' and string.find(reports.err, '^WRONGTYPE ') then
    reports, strange = math.huge, (strange or 0) + 1
  end
  -- With another error, such as while the slot moves, the heartbeat counts without its report.
  if type(reports) == 'number' then
    -- Live nodes soon report again.
    if reports > redis.call('ZCARD', KEYS[1]) + MOST_DEAD then redis.call('DEL', ARGV[6]) end
    if ARGV[7] == '' then
      -- The one there is no longer true, perhaps from before the node was started again.
      redis.call('HDEL', ARGV[6], ARGV[1])
    else
      redis.call('HSET', ARGV[6], ARGV[1], string.format('%.0f ', now) .. ARGV[7])
    end
    redis.call('PEXPIRE', ARGV[6], KEPT)
  end
end
return { redis.call('ZCARD', KEYS[1]), string.format('%.0f', born), strange }
