-- What a cluster with a parent does about one resource when it asks the parent. Mirrors
-- `freeze` and `thaw` of domain/lease/rules.rs.
--
-- Atomic, so that what the parent is told is leased out stays the most that is, until the
-- parent has answered. If its answer is lost (keep, or freeze after freeze), that is all that
-- the cluster still has of the lease. An answer to any but the last freeze comes too late, and
-- changes nothing: the node that asked after that has told the parent something else.
--
-- KEYS[1]  holders, as in lua/lease.lua
-- KEYS[2]  upstream, as there
-- ARGV[1]  freeze, thaw or keep
-- ARGV[2]  freeze: the microseconds for which it holds; thaw: the parent's lease, 6 packed
--          doubles: capacity, expiry in seconds, seconds between refreshes, safe capacity,
--          rule (0 to 3), seconds from grant to expiry; keep: ''
-- ARGV[3]  the time in microseconds; 0: Redis' own
-- ARGV[4]  the number of the freeze, 8 bytes that no other one has
--
-- The parent's lease is written as those 6 doubles and two more: the most that may be leased
-- out, and until when that holds, in microseconds. The number is in a field 'n' of its own, since
-- the first freeze comes before the first lease.
--
-- Reply: nil if nobody holds a lease on the resource; 2 if what is stored about it makes no sense,
-- so that nobody knows who does: lua/lease.lua drops it for the next client that asks. Else to
-- freeze: the sums as they are stored, and all of upstream from before, fields and values by turns,
-- the lease as it is now; to thaw and keep: 1.

-- See lua/guard.lua.
local STRANGE = 'what is stored about this resource makes no sense'
-- In seconds since the epoch: no key lives that long.
local LATEST = 100000000000
if ... then
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
    error(STRANGE, 0)
  end
  if frozen_until > 0 then
    lease = struct.pack('<d', math.min(capacity, frozen)) .. string.sub(lease, 9)
  end
end

if ARGV[1] == 'freeze' then
  local has, has_lo, _, _, count, _, ttl = struct.unpack('<ddddddd', sums, 49)
  local all = has + has_lo + count
  if all - all ~= 0 or not (ttl >= 0 and ttl < LATEST) then error(STRANGE, 0) end
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
      if all - all ~= 0 then error(STRANGE, 0) end
    end
  end
  redis.call('HSET', KEYS[2], 'n', ARGV[4])
  if #upstream == 0 then redis.call('EXPIREAT', KEYS[2], ttl) end
  return {sums, upstream}
end

if ARGV[1] == 'thaw' then lease = ARGV[2] end
if lease then
  redis.call('HSET', KEYS[2], '', string.sub(lease, 1, 48) .. struct.pack('<dd', 0, 0))
end
return 1
