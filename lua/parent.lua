-- Freezes one resource of a cluster with a parent while the parent is asked, and stores its answer.
-- Mirrors `freeze` and `thaw` of domain/lease/rules.rs.
--
-- Atomic, so that no more is leased out than the parent was told, until the parent has answered. If
-- the answer is lost (`keep`, or a second `freeze`), the amount that was told is all that the cluster
-- may use of its lease. An answer to an older freeze than the last changes nothing: the parent has
-- been told other numbers since.
--
-- KEYS[1]  holders, as in lua/lease.lua
-- KEYS[2]  upstream, as in lua/lease.lua
-- ARGV[1]  freeze, thaw or keep
-- ARGV[2]  freeze: how long it lasts, in µs. thaw: the parent's lease as 6 packed doubles: capacity,
--          expiry in s, refresh interval in s, safe capacity, algorithm (0 to 3), lease length in s.
--          keep: ''
-- ARGV[3]  the time in µs, for tests; 0: the server's own
-- ARGV[4]  the number of the freeze: 8 random bytes
--
-- The parent's lease is stored as those 6 doubles and two more: the most that may be leased out
-- during a freeze, and the end of the freeze in µs. The number of the freeze is in the field 'n',
-- because the first freeze comes before the first lease.
--
-- Reply: nil if nobody holds a lease on the resource; 2 if its record is corrupt (lua/lease.lua
-- replaces it at the next request). Else to thaw and keep: 1, even if they are outdated. Else to
-- freeze: the sums as stored, and the fields and values of upstream in turn, with the new freeze and
-- the number of the former one.

-- See lua/guard.lua.
local CORRUPT = 'what is stored about this resource makes no sense'
-- In s since the epoch: a later expiry is corrupt.
local LATEST = 100000000000
if ... then
  -- Marks the record as corrupt: '' can't be unpacked.
  redis.pcall('HSET', KEYS[1], '', '')
  redis.pcall('UNLINK', KEYS[2])
  return 2
end

local sums = redis.call('HGET', KEYS[1], '')
if not sums then return false end
if ARGV[1] ~= 'freeze' and redis.call('HGET', KEYS[2], 'n') ~= ARGV[4] then return 1 end
local lease = redis.call('HGET', KEYS[2], '')
if lease then
  local capacity, expiry, refresh, safe, kind, length = struct.unpack('<dddddd', lease)
  local frozen, frozen_until = struct.unpack('<dd', lease, 49)
  local all = capacity + expiry + refresh + safe + kind + length + frozen + frozen_until
  if not (all - all == 0 and capacity >= 0 and refresh >= 0 and safe >= 0 and kind >= 0 and kind <= 3
    and length >= 1 and frozen >= 0) then
    error(CORRUPT, 0)
  end
  if frozen_until > 0 then
    lease = struct.pack('<d', math.min(capacity, frozen)) .. string.sub(lease, 9)
  end
end

if ARGV[1] == 'freeze' then
  local has, has_lo, _, _, count, _, keys_until = struct.unpack('<ddddddd', sums, 49)
  local all = has + has_lo + count
  if all - all ~= 0 or not (keys_until >= 0 and keys_until < LATEST) then error(CORRUPT, 0) end
  if lease then
    local now = tonumber(ARGV[3])
    if now == 0 then
      local time = redis.call('TIME')
      now = time[1] * 1000000 + time[2]
    end
    lease = string.sub(lease, 1, 48) .. struct.pack('<dd', math.max(has, 0), now + ARGV[2])
    redis.call('HSET', KEYS[2], '', lease)
  end
  local upstream = redis.call('HGETALL', KEYS[2])
  for at = 1, #upstream, 2 do
    if #upstream[at] == 8 then
      local wants, wants_lo, subclients = struct.unpack('<ddd', upstream[at + 1])
      all = wants + wants_lo + subclients
      if all - all ~= 0 then error(CORRUPT, 0) end
    end
  end
  redis.call('HSET', KEYS[2], 'n', ARGV[4])
  if #upstream == 0 then redis.call('EXPIREAT', KEYS[2], keys_until) end
  return {sums, upstream}
end

if ARGV[1] == 'thaw' then lease = ARGV[2] end
if lease then
  redis.call('HSET', KEYS[2], '', string.sub(lease, 1, 48) .. struct.pack('<dd', 0, 0))
end
return 1
