-- Decides a batch of requests to buckets, and keeps count of dynamic buckets where a namespace
-- bounds them. Mirrors domain::bucket::decide and store::memory: the same operations in the
-- same order on the same doubles. Who changes one, changes both.
--
-- Atomic because a balance is read, judged and moved in one step, and because the count of
-- dynamic buckets must be exact over all nodes. Each bucket is loaded once and stored once,
-- and its requests are decided in their order.
--
-- KEYS     the buckets' states, then the namespaces' registers of dynamic buckets (flags COUNTED
--          and CONFIGURED): sorted sets of names by the time of their last use, in µs.
--          In a cluster these are not declared, but the last ones of ARGV: a batch has keys of
--          many slots, which one call may name only so. A key that this server does not have
--          (any more) is told in the reply, and nothing of its requests is done.
-- ARGV[1]  little-endian doubles: the time in µs since the epoch, for tests (0: the server's own
--          TIME), how many keys are states, how many keys are in ARGV, then for each of the
--          terms that the requests name:
--            cap       what fills an empty bucket, µs
--            max_debt  µs
--            mark      the terms' mark, a whole number below 2^29
--            idle      µs after its last use at which the bucket is removed; negative: never
--            bound     dynamic buckets that the namespace may hold (flag COUNTED)
--            grid      µs, a power of two: see "Expiry"
--            flags     COUNTED 1, CONFIGURED 2, REWRITE 4 (see "Expiry")
-- ARGV[2]  the runs, those of one bucket together; a run is some equal requests to one bucket:
--          '<I2I2I2I2I2I2dd':
--            key       which of KEYS
--            register  which of KEYS (flags COUNTED and CONFIGURED), or 0
--            name      which of ARGV has the bucket's name (the same flags), or 0
--            twin      which of ARGV has the state found under the namespace's other layout
--                      (bounded or not), or 0. The lower balance of the two counts, so that a
--                      change of the layout refills no bucket.
--            terms     which, from 1
--            count     how many requests; 1 with a register
--            cost      what the tokens cost, µs of accrual
--            max_wait  µs
-- ARGV[3…] names and twins
--
-- Reply: one string with '<I2d' for each run:
--   outcome  how many are granted, the first ones; plus 16384 if the bucket came into being, or
--            plus 32768 if it would be one dynamic bucket too many; 65535: the key is elsewhere
--   accrued  the balance that the first request met, µs of accrual; negative: in debt
-- and '<I4I4' after it with flag COUNTED:
--   removed  dynamic buckets dropped for being idle
--   live     dynamic buckets of the namespace afterwards
--
-- A state is 12 bytes, '<I6I3I3': the whole µs at which the balance is zero, modulo 2^48;
-- 18 bits of fraction below 6 bits of the mark; the mark's other 23 bits above one bit that
-- says that a debt beyond the limit was carried over from other limits.
--
-- Expiry. A full bucket and an absent one are the same, so a state may outlive the moment at
-- which its bucket is full. It expires on the next step of the grid after that: a grant that
-- does not pass a step leaves the expiry as it is, which spares most grants a third of their
-- cost. It is written anew with REWRITE: while states may be about that expire by other
-- limits, or where a bucket may be removed for being idle before it is full.
--
-- Why some calls look odd (an empty member or key that never exists, CH):
-- Redis keeps the last argument of each position for the next call made from any script, and
-- stores SET's value, position 2, in the memory of one kept there if that is long enough. A
-- name or a time at position 2 would cost each bucket 16 bytes or more for nothing.

local TERMS, RUN = '<ddddddd', '<I2I2I2I2I2I2dd'
local TERMS_BYTES = 56
local CREATED, TOO_MANY, ELSEWHERE = 16384, 32768, 65535
local FRACTIONS, SLACK, TIME_MODULUS = 262144, 0.00390625, 281474976710656
-- The longest debt that can be stored, in µs: four years.
local MAX_SPAN = 126230400000000
-- The most idle buckets that one request drops, so that none takes long.
local DROP_LIMIT = 100

local call, pack, unpack_bytes = redis.call, struct.pack, struct.unpack
local floor, ceil = math.floor, math.ceil
local numbers, runs = ARGV[1], ARGV[2]

local now, states, placed = unpack_bytes('<ddd', numbers)
local keys = KEYS
if placed > 0 then keys = { unpack(ARGV, #ARGV - placed + 1) } end
local simulated = now ~= 0
if not simulated then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

-- Whether an error is about what is stored, and not about where.
local function foreign(failure)
  return string.find(failure.err, 'WRONGTYPE', 1, true) ~= nil
end

-- A value of any other type or length is no state of ours, and counts as absent. ELSEWHERE
-- stands for one that this server does not have.
local values
if placed == 0 and states > 1 then
  values = call('MGET', keys[1], '', unpack(keys, 2, states))
  table.remove(values, 2)
else
  values = {}
  for i = 1, states do
    local value = redis.pcall('GET', keys[i])
    if type(value) ~= 'table' then
      values[i] = value
    else
      values[i] = not foreign(value) and ELSEWHERE
    end
  end
end

-- Tokens a second, of the upper 24 bits of a mark.
local function rate(bits)
  local mantissa = bits % 262144
  local exponent = floor(bits / 262144)
  return math.ldexp(1 + mantissa / 262144, exponent - 32)
end

-- The terms in use.
local term = 0
local cap, max_debt, mark, idle, bound, grid, flags
local counted, configured, rewrite

-- What a state says: the balance, as a time; the moment at which it is zero; whether it must
-- be written anew to say so; whether a debt beyond the limit was carried over.
local function balance(value)
  local whole, middle, last = unpack_bytes('<I6I3I3', value)
  local fraction = middle % FRACTIONS
  local carried = last % 2 == 1
  local restated = false
  local since = (now - whole) % TIME_MODULUS
  if since >= TIME_MODULUS / 2 then since = since - TIME_MODULUS end
  local accrued = since - fraction / FRACTIONS
  local old_mark = floor(middle / FRACTIONS) * 8388608 + floor(last / 2)
  if old_mark ~= mark then
    local old_bits, bits = floor(old_mark / 32), floor(mark / 32)
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

-- The register: is the bucket in it, and is there room if it isn't? The states of idle buckets
-- need no removal: they were written to expire by then. Nothing: it is elsewhere.
local function look_up(register, name)
  local known, removed = true, 0
  local scores = redis.pcall('ZMSCORE', register, '', name)
  if scores.err then
    if not foreign(scores) then return end
    -- Whatever this is, it is no register of ours.
    call('DEL', register)
    scores = {}
  end
  local last_use = scores[2]
  known = last_use and true or false
  if known and idle >= 0 and now - tonumber(last_use) >= idle then
    call('ZREM', register, '', name)
    known = false
    removed = 1
  end
  local live = call('ZCARD', register)
  if not known and idle >= 0 and live > 0 then
    local latest = string.format('%.0f', now - idle)
    local gone = call('ZRANGEBYSCORE', register, '-inf', latest, 'LIMIT', 0, DROP_LIMIT)
    if #gone > 0 then
      call('ZREM', register, '', unpack(gone))
      removed = removed + #gone
      live = call('ZCARD', register)
      if #gone == DROP_LIMIT then
        live = live - call('ZCOUNT', register, '-inf', latest)
      end
    end
  end
  return known, removed, live
end

local function record(register, name)
  call('ZADD', register, 'CH', string.format('%.0f', now), name)
  if idle >= 0 then
    call('EXPIREAT', register, string.format('%.0f', ceil((now + idle) / 1000000)))
  else
    call('PERSIST', register)
  end
end

-- The bucket at hand: its balance; when that is zero; whether it has a state, which must be
-- written anew, or whose debt was carried over; whether it is full.
local key, accrued, whole, fraction, had, restated, carried, full = 0, 0, 0, 0, false, false, false, false
-- Whether to store it, or to remove it; whether the stored one's expiry is known by its step.
local dirty, gone, known_step, step_before = false, false, false, 0

local function load(twin)
  local value = values[key]
  if value == ELSEWHERE or value and #value ~= 12 then value = false end
  if value and simulated then
    local expires_ms = call('PEXPIRETIME', keys[key])
    if expires_ms >= 0 and floor(now / 1000) > expires_ms then value = false end
  end
  accrued, whole, fraction, restated, carried = cap, 0, 0, false, false
  had, dirty, gone, known_step = false, false, false, false
  if value then
    accrued, whole, fraction, restated, carried = balance(value)
    had, known_step, step_before = true, not rewrite, floor((whole + cap) / grid)
  end
  if twin and #twin == 12 then
    local other = { balance(twin) }
    if other[1] < accrued then
      accrued, whole, fraction, restated, carried = unpack(other)
      had, known_step, dirty = true, false, true
    end
  end
  full = accrued >= cap
  if full then accrued = cap end
end

local function store()
  if gone then
    call('DEL', keys[key])
    values[key] = false
  elseif dirty then
    local high = floor(mark / 8388608)
    local value = pack('<I6I3I3', whole % TIME_MODULUS, fraction + high * FRACTIONS,
      (mark - high * 8388608) * 2 + (carried and 1 or 0))
    local step = floor((whole + cap) / grid)
    if known_step and step == step_before then
      call('SET', keys[key], value, 'KEEPTTL')
    else
      local expires_ms = ceil((step + 1) * grid / 1000)
      if idle >= 0 then
        expires_ms = math.min(expires_ms, ceil((now + idle) / 1000))
      end
      call('SET', keys[key], value, 'PXAT', expires_ms)
    end
    values[key] = value
  end
end

-- Moves the zero of the balance by so many µs, rounded up.
local function move(us)
  local step = floor(us)
  fraction = fraction + ceil((us - step) * FRACTIONS)
  whole = whole + step
  if fraction >= FRACTIONS then
    whole = whole + 1
    fraction = fraction - FRACTIONS
  end
end

local replies = {}
local at, length = 1, #runs
while at <= length do
  local run_key, register, name, twin, run_term, count, cost, max_wait
  run_key, register, name, twin, run_term, count, cost, max_wait, at = unpack_bytes(RUN, runs, at)
  if run_key ~= key or run_term ~= term then
    if key > 0 then store() end
    if run_term ~= term then
      term = run_term
      cap, max_debt, mark, idle, bound, grid, flags =
        unpack_bytes(TERMS, numbers, 25 + (term - 1) * TERMS_BYTES)
      counted, configured, rewrite = flags % 2 == 1, flags % 4 >= 2, flags >= 4
    end
    key = run_key
    load(ARGV[twin])
  end

  local known, removed, live = true, 0, 0
  local elsewhere = values[key] == ELSEWHERE
  if counted and not elsewhere then
    known, removed, live = look_up(keys[register], ARGV[name])
    elsewhere = known == nil
  elseif configured then
    redis.pcall('ZREM', keys[register], '', ARGV[name])
  end

  local outcome, met = TOO_MANY, 0
  if elsewhere then
    outcome, removed, live = ELSEWHERE, 0, 0
  elseif known or live < bound then
    met = accrued
    local granted, was_full = 0, full
    while granted < count and -accrued - SLACK <= max_wait
      and cost - accrued - SLACK <= max_debt do
      if not had or restated or full then
        whole, fraction = now, 0
        move(cost - accrued)
        if restated then known_step = false end
        had, restated = true, false
      else
        move(cost)
      end
      carried = false
      accrued = now - whole - fraction / FRACTIONS
      full = accrued >= cap
      if full then accrued = cap end
      granted = granted + 1
    end
    if granted > 0 then
      dirty, gone = true, false
    end
    if granted < count then
      -- A refusal changes nothing, but what it says of a state under other limits is kept.
      if restated and full then
        gone, dirty, had, restated, carried = true, false, false, false, false
      elseif restated then
        carried = carried and accrued < -max_debt
        whole, fraction, restated = now, 0, false
        move(-accrued)
        dirty, known_step = true, false
      elseif rewrite and had then
        dirty = true
      end
    end
    outcome = granted
    if counted then
      -- A bucket counts from its first grant on; every use of one that counts is recorded.
      if known or granted > 0 or not was_full then
        record(keys[register], ARGV[name])
        if not known then
          outcome = outcome + CREATED
          live = live + 1
        end
      end
    elseif granted > 0 and was_full then
      outcome = outcome + CREATED
    end
  end
  if counted then
    replies[#replies + 1] = pack('<I2dI4I4', outcome, met, removed, live)
  else
    replies[#replies + 1] = pack('<I2d', outcome, met)
  end
end
store()
return table.concat(replies)
