-- Makes a version of the limits the current one. Mirrors store::memory::versions.
--
-- Atomic so that each version has one author: the number of the current version is compared and
-- replaced in one step.
--
-- KEYS[1]  a hash: `n`, the number of the current version; for each kept version N `aN`, what is known
--          of it as JSON, and `tN`, its text
-- ARGV[1]  1: only if the current version has the number before; 0: if it has any lower number, or if
--          there is none
-- ARGV[2]  the number of the new version
-- ARGV[3]  what is known of it
-- ARGV[4]  its text
-- ARGV[5]  how many versions are kept
--
-- Reply: -1 if the version is the current one now, else the number of the current one (0: none).

local key, number, kept = KEYS[1], tonumber(ARGV[2]), tonumber(ARGV[5])
local current = redis.pcall('HGET', key, 'n')
local is_foreign = type(current) == 'table'
if is_foreign and not string.find(current.err, '^WRONGTYPE ') then return current end
current = not is_foreign and tonumber(current or 0) or 0
-- No version has a higher number: see store::versions::MAX_NUMBER.
if current > 1e14 then current = 0 end
if ARGV[1] == '1' and current + 1 ~= number or current >= number then return current end
if is_foreign then redis.call('DEL', key) end

-- The first write of the call has the text: only there Redis asks whether it has memory left.
redis.call('HSET', key, 't' .. ARGV[2], ARGV[4], 'a' .. ARGV[2], ARGV[3], 'n', ARGV[2])
-- A version that was given back may be far ahead of those that are kept.
for old = math.max(current - kept + 1, 1), math.min(current, number - kept) do
  redis.call('HDEL', key, 't' .. old, 'a' .. old)
end
return -1
