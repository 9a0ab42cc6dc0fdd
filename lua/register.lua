-- Gives a name a place in the register of a namespace's dynamic buckets, and takes back the places
-- of names whose buckets have no state. See "Registers" in allow.lua. Mirrors the number of buckets
-- that store::memory keeps for a namespace.
--
-- Atomic so that the number of names never exceeds the bound, whichever nodes add names.
--
-- KEYS[1]  the register: a sorted set of names by a time in ms at which their state may have expired
-- ARGV[1]  the time in µs since the epoch, for tests; 0: the server's own TIME
-- ARGV[2]  the name that needs a place
-- ARGV[3]  the most names; negative: the name is added in any case, as its bucket has a state
-- ARGV[4…] what a node has found out about names with low scores, three for each:
--            the name
--            its score at that time
--            when its bucket's state expires, in ms; '' if there is no state
--          A name whose score has changed since then is left alone: it may have a new state.
--
-- Reply: 1 if the name was given or kept a place, else 0; the number of names; how many of those with
-- low scores are gone or have another score than the node has seen; the time in µs as text.

-- How long a name keeps its place before its bucket has a state, in ms: longer than a node takes to
-- decide. The half millisecond marks the score of such a name: states expire at whole milliseconds.
local UNUSED_KEPT = 10000.5
-- How long the register is kept after a change, in seconds: 30 days.
local REGISTER_KEPT = 2592000

local call = redis.call
local register, name, bound = KEYS[1], ARGV[2], tonumber(ARGV[3])
local now = tonumber(ARGV[1])
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local now_ms = math.floor(now / 1000)

local names = redis.pcall('ZCARD', register)
if type(names) == 'table' then
  if not string.find(names.err, '^WRONGTYPE ') then return names end
  call('DEL', register)
end

-- One command of each kind for all names, as a command costs more than what it does.
local seen = {}
for i = 4, #ARGV, 3 do seen[#seen + 1] = ARGV[i] end
local scores = #seen > 0 and call('ZMSCORE', register, unpack(seen))
local gone, scored, changed = {}, {}, 0
for i = 1, #seen do
  local score, expires_ms = ARGV[3 * i + 2], ARGV[3 * i + 3]
  if scores[i] ~= score then
    -- It was registered again, or removed.
    changed = changed + 1
  elseif expires_ms ~= '' then
    if expires_ms ~= score then
      scored[#scored + 1], scored[#scored + 2] = expires_ms, seen[i]
    end
  else
    local left_ms = score - now_ms
    if score % 1 == 0 or left_ms > UNUSED_KEPT then
      gone[#gone + 1] = seen[i]
    elseif left_ms <= 0 then
      -- Its time to get a state is over, but it may have got one since the node looked. A node that
      -- sees the new score has looked later than that.
      scored[#scored + 1], scored[#scored + 2] = string.format('%.0f', now_ms), seen[i]
    end
  end
end
if #gone > 0 then changed = changed + call('ZREM', register, unpack(gone)) end
if #scored > 0 then changed = changed + call('ZADD', register, 'XX', 'CH', unpack(scored)) end

local placed = 0
names = call('ZCARD', register)
-- A name that has a place does not count against the bound itself.
if bound < 0 or names < bound or names == bound and call('ZSCORE', register, name) then
  -- Changes the score even if the name has a place: a removal based on the old score then fails.
  call('ZADD', register, string.format('%.1f', now_ms + UNUSED_KEPT), name)
  call('EXPIRE', register, REGISTER_KEPT)
  placed = 1
end
return { placed, call('ZCARD', register), changed, string.format('%.0f', now) }
