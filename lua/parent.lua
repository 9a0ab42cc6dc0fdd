-- What a cluster with a parent does about one resource when it asks the parent. Mirrors
-- `freeze` and `thaw` of domain/lease.rs.
--
-- Atomic, so that what the parent is told is leased out stays the most that is, until the
-- parent has answered. If its answer is lost (keep, or freeze after freeze), that is all that
-- the cluster still has of the lease.
--
-- KEYS[1]  holders, as in lua/lease.lua
-- KEYS[2]  upstream, as there
-- ARGV[1]  freeze, thaw or keep
-- ARGV[2]  freeze: the microseconds for which it holds; thaw: the parent's lease, 6 packed
--          doubles: capacity, expiry in seconds, seconds between refreshes, safe capacity,
--          rule (0 to 3), seconds from grant to expiry; keep: ''
-- ARGV[3]  the time in microseconds; 0: Redis' own
--
-- The parent's lease is written as those 6 doubles and two more: the most that may be leased
-- out, and until when that holds, in microseconds.
--
-- Reply: nil if nobody holds a lease on the resource. Else to freeze: the sums as they are
-- stored, and all of upstream, fields and values by turns; to thaw and keep: 1.

local sums = redis.call('HGET', KEYS[1], '')
if not sums then return false end
local lease = redis.call('HGET', KEYS[2], '')
if lease then
  local capacity = struct.unpack('<d', lease)
  local frozen, frozen_until = struct.unpack('<dd', lease, 49)
  if frozen_until > 0 then
    lease = struct.pack('<d', math.min(capacity, frozen)) .. string.sub(lease, 9)
  end
end

if ARGV[1] == 'freeze' then
  if lease then
    local now = tonumber(ARGV[3])
    if now == 0 then
      local time = redis.call('TIME')
      now = time[1] * 1000000 + time[2]
    end
    local has, has_lo = struct.unpack('<dd', sums, 49)
    lease = string.sub(lease, 1, 48) .. struct.pack('<dd', math.max(has, 0), now + ARGV[2])
    redis.call('HSET', KEYS[2], '', lease)
  end
  return {sums, redis.call('HGETALL', KEYS[2])}
end

local fresh = redis.call('EXISTS', KEYS[2]) == 0
if ARGV[1] == 'thaw' then lease = ARGV[2] end
if lease then
  redis.call('HSET', KEYS[2], '', string.sub(lease, 1, 48) .. struct.pack('<dd', 0, 0))
end
if fresh then
  local ttl = struct.unpack('<d', sums, 97)
  redis.call('EXPIREAT', KEYS[2], ttl)
end
return 1
