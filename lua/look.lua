-- Looks at a bucket, and fills it up if it is told to. The node computes the balance:
-- domain::algorithm::balance.
--
-- Atomic so that state and time belong together, and so that no decision comes between the look and
-- the removal.
--
-- KEYS[1]  the state of the bucket: see allow.lua
-- ARGV[1]  1: remove the state, as a bucket without one is full. A name with a place in a register
--          keeps it until another name needs it. 0: change nothing.
--
-- Reply: the state, empty if there is none or the key has a value of another type; when it expires, in
-- ms (-1: never, -2: the key does not exist); the time: seconds, and microseconds.

local state = redis.pcall('GET', KEYS[1])
if type(state) == 'table' then
  if not string.find(state.err, '^WRONGTYPE ') then return state end
  state = ''
end
local expires_ms, time = redis.call('PEXPIRETIME', KEYS[1]), redis.call('TIME')
if ARGV[1] == '1' then redis.call('DEL', KEYS[1]) end
return { state or '', expires_ms, time[1], time[2] }
