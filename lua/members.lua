-- Lists nodes with their reports: the live ones, and those that have died less than an hour ago. Changes
-- nothing.
--
-- Atomic, so that times and reports are of one moment.
--
-- KEYS[1]  the nodes: see heartbeat.lua
-- ARGV[1]  the key of their reports. Not in KEYS, because it may have another hash tag than KEYS[1].
-- ARGV[2]  how many of each at most
--
-- Reply: for each node three parts: its id; how long ago its last heartbeat was, in µs; and its report,
-- empty if there is none.

-- The key of the nodes has another type, until the next heartbeat: see lua/guard.lua.
if ... then return {} end

local HOUR = 3600000000
local most = tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local nodes, reports = {}, {}
local function add(id, at, report)
  nodes[#nodes + 1] = id
  nodes[#nodes + 1] = string.format('%.0f', math.min(math.max(now - at, 0), HOUR))
  nodes[#nodes + 1] = report
end

local found = redis.pcall('HGETALL', ARGV[1])
-- It has another type, or its slot moves: the live nodes are listed nevertheless.
if found.err then found = {} end
for at = 1, #found, 2 do reports[found[at]] = found[at + 1] end
local live = redis.call('ZREVRANGE', KEYS[1], '0', most - 1, 'WITHSCORES')
for at = 1, #live, 2 do
  local id = live[at]
  add(id, tonumber(live[at + 1]), string.match(reports[id] or '', '^%d+ (.*)$') or '')
  reports[id] = nil
end
for id, value in pairs(reports) do
  local at, report = string.match(value, '^(%d+) (.*)$')
  at = tonumber(at or 0)
  -- One from the future is from before the clock was set back.
  if most > 0 and at <= now and now - at < HOUR then
    add(id, at, report)
    most = most - 1
  end
end
return nodes
