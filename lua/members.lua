-- Lists nodes, those with the latest heartbeats first, each with its report. Changes nothing.
--
-- Atomic, so that times and reports are of one moment.
--
-- KEYS[1]  the nodes, and KEYS[2] their reports: see heartbeat.lua
-- ARGV[1]  how many at most
--
-- Reply: for each node three parts: its id; how long ago its last heartbeat was, in µs; and its report,
-- empty if there is none.

-- A key has another type, until the next heartbeat: see lua/guard.lua.
if ... then return {} end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local seen = redis.call('ZREVRANGE', KEYS[1], '0', ARGV[1] - 1, 'WITHSCORES')
local ids, nodes = {}, {}
for at = 1, #seen, 2 do ids[#ids + 1] = seen[at] end
if #ids == 0 then return nodes end
local reports = redis.call('HMGET', KEYS[2], unpack(ids))
for at, id in ipairs(ids) do
  nodes[3 * at - 2] = id
  nodes[3 * at - 1] = string.format('%.0f', math.max(now - seen[2 * at], 0))
  nodes[3 * at] = reports[at] or ''
end
return nodes
