-- Decides one request to one bucket, and keeps count of dynamic buckets where a namespace
-- bounds them. Mirrors domain::bucket::decide and store::memory: the same operations in the
-- same order on the same doubles. Who changes one, changes both.
--
-- Atomic because the balance is read, judged and moved in one step, and because the count of
-- dynamic buckets must be exact over all nodes.
--
-- KEYS[1]  the bucket's state
-- KEYS[2]  the namespace's register of dynamic buckets (flags COUNTED or CONFIGURED): a sorted
--          set of names by the time of their last use, in µs; of the same hash tag
-- ARGV[1]  ten little-endian doubles:
--            cost      what the tokens cost, µs of accrual
--            interval  what one token costs, µs
--            cap       what fills an empty bucket, µs
--            max_wait  µs
--            max_debt  µs
--            mark      the terms' mark, a whole number below 2^29
--            idle      µs after its last use at which the bucket is removed; negative: never
--            bound     dynamic buckets that the namespace may hold (flag COUNTED)
--            flags     COUNTED 1, CONFIGURED 2
--            now       µs since the epoch, for tests; 0: the server's own TIME
-- ARGV[2]  the bucket's name (flags COUNTED or CONFIGURED), else empty
-- ARGV[3]  the state found under the namespace's other layout (bounded or not), or nothing. The
--          lower balance of the two counts, so that a change of the layout refills no bucket.
--
-- Reply: one string, '<BBI4I4d':
--   verdict  0 granted, 1 refused (wait or debt too long), 2 too many dynamic buckets
--   created  1 when the bucket came into being
--   removed  dynamic buckets dropped for being idle
--   live     dynamic buckets of the namespace afterwards (flag COUNTED), else 0
--   accrued  the balance that the request met, µs of accrual; negative: in debt
--
-- A state is 12 bytes, '<I6I3I3': the whole µs at which the balance is zero, modulo 2^48;
-- 18 bits of fraction below 6 bits of the mark; the mark's other 23 bits above one bit that
-- says that a debt beyond the limit was carried over from other limits. It expires when the
-- bucket is full again, or when it has been idle for too long.
--
-- Why some calls look odd (an empty member that never exists, CH, whole seconds):
-- Redis keeps the last argument of each position for the next call made from any script, and
-- stores SET's value, position 2, in the memory of one kept there if that is long enough. A
-- name or a time at position 2 would cost each bucket 16 bytes or more for nothing.

local cost, interval, cap, max_wait, max_debt, mark, idle, bound, flags, now =
  struct.unpack('<dddddddddd', ARGV[1])

local COUNTED, CONFIGURED = 1, 2
local FRACTIONS, SLACK, TIME_MODULUS = 262144, 0.00390625, 281474976710656
-- The longest debt that can be stored, in µs: four years.
local MAX_SPAN = 126230400000000
-- The most idle buckets that one call drops, so that no call takes long.
local DROP_LIMIT = 100

local simulated = now ~= 0
if not simulated then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

local function integer(number)
  return string.format('%.0f', number)
end

-- Tokens a second, of the upper 24 bits of a mark.
local function rate(bits)
  local mantissa = bits % 262144
  local exponent = math.floor(bits / 262144)
  return math.ldexp(1 + mantissa / 262144, exponent - 32)
end

-- A value of any other type or length is no state of ours, and counts as absent.
local function read(key)
  local value = redis.pcall('GET', key)
  if type(value) ~= 'string' or #value ~= 12 then
    return nil
  end
  if simulated then
    local expires_ms = redis.call('PEXPIRETIME', key)
    if expires_ms >= 0 and math.floor(now / 1000) > expires_ms then
      return nil
    end
  end
  return value
end

-- The register: is the bucket in it, and is there room if it isn't? The states of idle buckets
-- need no removal: they were written to expire by then.
local known, removed, live = true, 0, 0
local register = nil
if flags == COUNTED then
  register = KEYS[2]
  local scores = redis.pcall('ZMSCORE', register, '', ARGV[2])
  if scores.err then
    -- Whatever this is, it is no register of ours.
    redis.call('DEL', register)
    scores = {}
  end
  local last_use = scores[2]
  known = last_use and true or false
  if known and idle >= 0 and now - tonumber(last_use) >= idle then
    redis.call('ZREM', register, '', ARGV[2])
    known = false
    removed = 1
  end
  live = redis.call('ZCARD', register)
  if not known and idle >= 0 and live > 0 then
    local latest = integer(now - idle)
    local gone = redis.call('ZRANGEBYSCORE', register, '-inf', latest, 'LIMIT', 0, DROP_LIMIT)
    if #gone > 0 then
      redis.call('ZREM', register, '', unpack(gone))
      removed = removed + #gone
      live = redis.call('ZCARD', register)
      if #gone == DROP_LIMIT then
        live = live - redis.call('ZCOUNT', register, '-inf', latest)
      end
    end
  end
  if not known and live >= bound then
    return struct.pack('<BBI4I4d', 2, 0, removed, live, 0)
  end
elseif flags == CONFIGURED then
  redis.pcall('ZREM', KEYS[2], '', ARGV[2])
end

-- What a state says: the balance, as a time; the moment at which it is zero; whether it must
-- be written anew to say so; whether a debt beyond the limit was carried over.
local function balance(value)
  local whole, middle, last = struct.unpack('<I6I3I3', value)
  local fraction = middle % FRACTIONS
  local carried = last % 2 == 1
  local restated = false
  local since = (now - whole) % TIME_MODULUS
  if since >= TIME_MODULUS / 2 then since = since - TIME_MODULUS end
  local accrued = since - fraction / FRACTIONS
  local old_mark = math.floor(middle / FRACTIONS) * 8388608 + math.floor(last / 2)
  if old_mark ~= mark then
    local old_bits, bits = math.floor(old_mark / 32), math.floor(mark / 32)
    if old_bits ~= bits then
      accrued = math.max(accrued * (rate(old_bits) / rate(bits)), -MAX_SPAN)
    end
    restated, carried = true, true
  end
  if not carried and accrued < -max_debt - 1 then
    accrued = -max_debt
    restated = true
  end
  return accrued, now - since, fraction, restated, carried
end

local value = read(KEYS[1])
local accrued, whole, fraction, restated, carried = cap, 0, 0, false, false
if value then
  accrued, whole, fraction, restated, carried = balance(value)
end
if ARGV[3] and #ARGV[3] == 12 then
  local other = { balance(ARGV[3]) }
  if other[1] < accrued then
    value = ARGV[3]
    accrued, whole, fraction, restated, carried = unpack(other)
  end
end
local full = accrued >= cap
if full then accrued = cap end

-- The state whose `zero` is `whole` and `fraction` moved by `us`, rounded up.
local function encode(us, still_carried)
  local step = math.floor(us)
  local frac = fraction + math.ceil((us - step) * FRACTIONS)
  if frac >= FRACTIONS then
    step = step + 1
    frac = frac - FRACTIONS
  end
  local high = math.floor(mark / 8388608)
  local low = mark - high * 8388608
  return struct.pack('<I6I3I3', (whole + step) % TIME_MODULUS, frac + high * FRACTIONS,
    low * 2 + (still_carried and 1 or 0))
end

local function expiry(balance)
  local ms = math.ceil((now - balance + cap) / 1000)
  if idle >= 0 then ms = math.min(ms, math.ceil((now + idle) / 1000)) end
  return integer(ms)
end

local granted = -accrued - SLACK <= max_wait and cost - accrued - SLACK <= max_debt
if granted then
  local step = cost
  if not value or restated or full then
    whole, fraction, step = now, 0, cost - accrued
  end
  redis.call('SET', KEYS[1], encode(step, false), 'PXAT', expiry(accrued - cost))
elseif value and full and restated then
  redis.call('DEL', KEYS[1])
elseif value then
  if restated then
    carried = carried and accrued < -max_debt
    whole, fraction = now, 0
    value = encode(-accrued, carried)
  end
  -- Also where the state is as it was: the size, and so the expiry, may have changed.
  redis.call('SET', KEYS[1], value, 'PXAT', expiry(accrued))
end

-- A bucket counts from its first grant on; every use of one that counts is recorded.
local created = 0
if register then
  if known or granted or value then
    redis.call('ZADD', register, 'CH', integer(now), ARGV[2])
    if idle >= 0 then
      redis.call('EXPIREAT', register, integer(math.ceil((now + idle) / 1000000)))
    else
      redis.call('PERSIST', register)
    end
    if not known then
      created = 1
      live = live + 1
    end
  end
elseif granted and not value then
  created = 1
end

return struct.pack('<BBI4I4d', granted and 0 or 1, created, removed, live, accrued)
