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
--            life      µs after its balance was zero for which a state is needed: cap, or more
--                      where nodes hold tokens of the bucket themselves
-- ARGV[2]  the runs; a run is some equal requests to one bucket. They come in groups of equal
--          limits and costs; '<I2I2dd' begins one:
--            terms     which, from 1
--            size      how many runs, each of the next key, and then as many bytes: how many
--                      requests each of them is; 0: a single run, and then '<I2I2I2I2I2':
--              key       which of KEYS; runs of one key follow each other
--              register  which of KEYS (flags COUNTED and CONFIGURED), or 0
--              name      which of ARGV has the bucket's name (the same flags), or 0
--              twin      which of ARGV has the state found under the namespace's other layout
--                        (bounded or not), or 0. The lower balance of the two counts, so that a
--                        change of the layout refills no bucket.
--              count     how many requests; 1 with a register
--            cost      what the tokens of a request cost, µs of accrual; negative: so much is
--                      given back
--            max_wait  µs; negative: so much must be there
-- ARGV[3…] names and twins
--
-- Reply: two strings. The first has a byte for each run: how many are granted, the first ones;
-- with 127 more if the bucket came into being; 254: it would be one dynamic bucket too many;
-- 255: the key is elsewhere. The second has little-endian doubles for each:
--   accrued  the balance that the first request met, µs of accrual; negative: in debt
-- and with flag COUNTED:
--   removed  dynamic buckets dropped for being idle
--   live     dynamic buckets of the namespace afterwards
-- and, only if there were any, a number: how many values were replaced or removed that no node can
-- have written. What such a value was about counts as absent: a bucket as full.
--
-- A state is 12 bytes, '<I6I6': the whole µs at which the balance is zero, modulo 2^48; and from
-- below 18 bits of fraction, the mark's upper 6 bits, one bit that says that a debt beyond the
-- limit was carried over from other limits, the mark's lower 23 bits.
--
-- Expiry. A full bucket and an absent one are the same, so a state may outlive the moment at
-- which its bucket is full. It expires on the next step of the grid after that: a grant that
-- does not pass a step leaves the expiry as it is, which spares most grants a third of their
-- cost. It is written anew with REWRITE: while states may be about that expire by other
-- limits, or where a bucket may be removed for being idle before it is full.
--
-- Why some things look odd. Most of the time goes into calls from Lua into C, and the rest into
-- what Lua does itself, so there is little of both for what nearly all requests are: the first
-- of a bucket in the batch, that is not full and has the limits of today. x - x % 1 rounds
-- down, and SETRANGE, which leaves the expiry alone, costs two thirds of SET with KEEPTTL. And
-- an empty member or key that never exists, and CH:
-- Redis keeps the last argument of each position for the next call made from any script, and
-- stores SET's value, position 2, in the memory of one kept there if that is long enough. A
-- name or a time at position 2 would cost each bucket 16 bytes or more for nothing.

local TERMS, GROUP, RUN, STATE = '<dddddddd', '<I2I2dd', '<I2I2I2I2I2', '<I6I6'
local TERMS_BYTES = 64
local CREATED, TOO_MANY, ELSEWHERE = 127, 254, 255
local FRACTIONS, SLACK, TIME_MODULUS = 262144, 0.00390625, 281474976710656
-- What CARRIED adds to the upper 30 bits of a state's second half.
local CARRIED = 16777216
-- The longest debt that can be stored, in µs: four years.
local MAX_SPAN = 126230400000000
-- The most idle buckets that one request drops, so that none takes long.
local DROP_LIMIT = 100
-- No clock that steps back makes a last use seem to come by more than this, in µs: an hour.
local AHEAD = 3600000000

-- Nothing that is stored makes this script fail: what does is arguments (lua/guard.lua).
local NO_ARGUMENTS = 'ERR these are no arguments of this script'
if ... then return { err = NO_ARGUMENTS } end

local call, pack, unpack_bytes = redis.call, struct.pack, struct.unpack
local numbers, groups = ARGV[1], ARGV[2]

local now, states, placed = unpack_bytes('<ddd', numbers)
local keys = KEYS
if placed > 0 then keys = { unpack(ARGV, #ARGV - placed + 1) } end
if not (states <= #keys) then return { err = NO_ARGUMENTS } end
local simulated = now ~= 0
if not simulated then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

-- Whether an error is about what is stored, and not about where.
local function foreign(failure)
  return string.find(failure.err, 'WRONGTYPE', 1, true) ~= nil
end

-- How many values no node can have written; nil: none.
local strange

-- The state of key i is at i + 1. One of any other type or length is none of ours, and counts
-- as absent. ELSEWHERE stands for one that this server does not have.
local values
if placed == 0 and states > 1 then
  values = call('MGET', keys[1], '', unpack(keys, 2, states))
  values[2] = values[1]
else
  values = {}
  for i = 1, states do
    local value = redis.pcall('GET', keys[i])
    if type(value) == 'table' then value = not foreign(value) and ELSEWHERE end
    values[i + 1] = value
  end
end

-- The terms in use; a mark as states have it.
local term = 0
local cap, max_debt, mark, idle, bound, grid, flags, life
local counted, configured, rewrite

-- The bucket at hand: which key; its balance; when that is zero; whether it has a state, which
-- must be written anew, or whose debt was carried over; whether it is full.
local key, accrued, whole, fraction = 0, 0, 0, 0
local had, restated, carried, full = false, false, false, false
-- Whether to store it, or to remove it; whether the stored one's expiry is known, and by which
-- zero.
local dirty, gone, known_expiry, whole_before = false, false, false, 0

-- What the requests at hand cost, also in whole µs and fractions; the longest wait.
local cost, cost_whole, cost_fraction, max_wait

local function expired(at_key)
  local expires_ms = call('PEXPIRETIME', keys[at_key])
  return expires_ms >= 0 and math.floor(now / 1000) > expires_ms
end

-- Stores a state whose bucket is full within a step of the grid. `absent`: none was found, so that
-- whatever is there is none of ours. To find out costs less here than when it is read.
local function set(name, value, step, absent)
  local expires_ms = math.ceil((step + grid) / 1000)
  if idle >= 0 then
    expires_ms = math.min(expires_ms, math.ceil((now + idle) / 1000))
  end
  if absent then
    if call('SET', name, value, 'PXAT', expires_ms, 'NX') then return end
    strange = (strange or 0) + 1
  end
  call('SET', name, value, 'PXAT', expires_ms)
end

-- For runs that are not usual; made when one comes.
local load, store, decide, look_up, record

local outcomes, answers, told, tell = {}, 0, {}, 0
local at, length, plain = 1, #groups, 0
while at <= length do
  local run_term, size
  run_term, size, cost, max_wait, at = unpack_bytes(GROUP, groups, at)
  cost_whole = cost - cost % 1
  cost_fraction = math.ceil((cost - cost_whole) * FRACTIONS)
  local run_key, register, name, twin, count
  if size == 0 then
    run_key, register, name, twin, count, at = unpack_bytes(RUN, groups, at)
  end
  if key > 0 and (run_key ~= key or run_term ~= term) then
    store()
    key = 0
  end
  if run_term ~= term then
    term = run_term
    cap, max_debt, mark, idle, bound, grid, flags, life =
      unpack_bytes(TERMS, numbers, 25 + (term - 1) * TERMS_BYTES)
    counted, configured, rewrite = flags % 2 == 1, flags % 4 >= 2, flags >= 4
    -- From 29 bits to where they are in a state.
    local low = mark % 8388608
    mark = (mark - low) / 8388608 * FRACTIONS + low * 2 * CARRIED
  end

  local unusual
  if size > 0 then
    local counts = { string.byte(groups, at, at + size - 1) }
    at = at + size
    local usual = not rewrite and cost > 0
    for i = 1, size do
      plain, answers = plain + 1, answers + 1
      local value = values[plain + 1]
      -- What follows is load, decide and store for the usual case, and leaves the others.
      local done = false
      if usual and value and value ~= ELSEWHERE and #value == 12
        and not (simulated and expired(plain)) then
        local zero, rest = unpack_bytes(STATE, value)
        local since = (now - zero) % TIME_MODULUS
        if since >= TIME_MODULUS / 2 then since = since - TIME_MODULUS end
        local part = rest % FRACTIONS
        local met = since - part / FRACTIONS
        if rest - part == mark and met < cap and met >= -max_debt - 1 then
          done = true
          tell = tell + 1
          told[tell] = met
          local asked, granted, added = counts[i], 0, 0
          while granted < asked and -met - SLACK <= max_wait and cost - met - SLACK <= max_debt do
            added = added + cost_whole
            part = part + cost_fraction
            if part >= FRACTIONS then
              added = added + 1
              part = part - FRACTIONS
            end
            met = since - added - part / FRACTIONS
            granted = granted + 1
          end
          outcomes[answers] = granted
          if granted > 0 then
            local full_at = now - since + life
            local step, later = full_at - full_at % grid, full_at + added
            later = later - later % grid
            value = pack(STATE, (zero + added) % TIME_MODULUS, mark + part)
            if step == later then
              call('SETRANGE', keys[plain], '0', value)
            else
              set(keys[plain], value, later)
            end
          end
        end
      end
      if not done then
        tell = tell + 1
        outcomes[answers], told[tell] = ELSEWHERE, 0
        if value ~= ELSEWHERE then
          unusual = unusual or {}
          unusual[#unusual + 1] = { plain, counts[i], answers, tell }
        end
      end
    end
  end

  if (unusual or size == 0) and not load then
    -- Making these takes as long as all the rest for one request.

    -- Of the upper 24 bits of a mark, as states have them: tokens a second.
    local function rate(upper)
      local exponent = upper % 16777216 / FRACTIONS
      local rest = (upper - upper % 33554432) / 33554432
      -- 23 bits of the mark: 18 of the mantissa, where 5 tell the debt limit.
      return math.ldexp(1 + math.floor(rest / 32) / 262144, exponent - 32)
    end

    -- Whether a node can have written a state with a mark like that.
    local function possible(upper)
      local exponent = upper % 16777216 / FRACTIONS
      local debt = (upper - upper % 33554432) / 33554432 % 32
      -- Rates are from 10^-8 to 10^8, and debt limits modulo 31.
      return exponent >= 5 and exponent <= 58 and debt < 31
    end

    -- What a state says: the balance, as a time; the moment at which it is zero; whether it must
    -- be written anew to say so; whether a debt beyond the limit was carried over. Nothing: it is
    -- none of ours. `at_key`: whose it is, where that can be looked at.
    local function balance(value, at_key)
      local whole, rest = unpack_bytes(STATE, value)
      local since = (now - whole) % TIME_MODULUS
      if since >= TIME_MODULUS / 2 then since = since - TIME_MODULUS end
      local fraction = rest % FRACTIONS
      local accrued = since - fraction / FRACTIONS
      local old_mark = rest - fraction
      local carried, restated = old_mark % (2 * CARRIED) >= CARRIED, false
      if carried then old_mark = old_mark - CARRIED end
      if old_mark ~= mark then
        -- All of ours expire. A debt of years that no one has made must not be paid.
        if not possible(old_mark) or at_key and call('PEXPIRETIME', keys[at_key]) < 0 then
          return
        end
        local old_rate, new_rate = rate(old_mark), rate(mark)
        if old_rate ~= new_rate then
          accrued = math.max(accrued * (old_rate / new_rate), -MAX_SPAN)
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
    function look_up(register, name)
      local known, removed = true, 0
      local scores = redis.pcall('ZMSCORE', register, '', name)
      if scores.err then
        if not foreign(scores) then return end
        -- Whatever this is, it is no register of ours.
        call('DEL', register)
        strange = (strange or 0) + 1
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
      if not known and live >= bound then
        -- Nobody's last use is still to come: such members would take up places for good.
        local latest = string.format('(%.0f', now + AHEAD)
        local ahead = call('ZREVRANGEBYSCORE', register, '+inf', latest, 'LIMIT', 0, DROP_LIMIT)
        if #ahead > 0 then
          call('ZREM', register, '', unpack(ahead))
          live = live - #ahead
          strange = (strange or 0) + 1
        end
      end
      return known, removed, live
    end

    function record(register, name)
      call('ZADD', register, 'CH', string.format('%.0f', now), name)
      if idle >= 0 then
        call('EXPIREAT', register, string.format('%.0f', math.ceil((now + idle) / 1000000)))
      else
        call('PERSIST', register)
      end
    end

    function load(twin)
      local value = values[key + 1]
      if value == ELSEWHERE then
        value = false
      elseif value and #value ~= 12 then
        value, values[key + 1] = false, false
      end
      if value and simulated and expired(key) then value = false end
      dirty, gone, known_expiry, had = false, false, false, false
      if value then
        accrued, whole, fraction, restated, carried = balance(value, key)
        if accrued then
          had, known_expiry, whole_before = true, not rewrite, whole
        else
          values[key + 1] = false
        end
      end
      if not had then
        accrued, whole, fraction, restated, carried = cap, 0, 0, false, false
      end
      if twin and #twin == 12 then
        local found = { balance(twin) }
        if found[1] and found[1] < accrued then
          accrued, whole, fraction, restated, carried = unpack(found)
          had, known_expiry, dirty = true, false, true
        end
      end
      full = accrued >= cap
      if full then accrued = cap end
    end

    function store()
      if gone then
        call('DEL', keys[key])
        values[key + 1] = false
      elseif dirty then
        local rest = fraction + mark + (carried and CARRIED or 0)
        local value = pack(STATE, whole % TIME_MODULUS, rest)
        local full_at, full_at_before = whole + life, whole_before + life
        local step = full_at - full_at % grid
        if known_expiry and step == full_at_before - full_at_before % grid then
          call('SETRANGE', keys[key], '0', value)
        else
          set(keys[key], value, step, not values[key + 1])
        end
        values[key + 1] = value
      end
      dirty, gone = false, false
    end

    -- Moves the zero of the balance by so many µs, rounded up.
    local function move(us)
      local below = us % 1
      fraction = fraction + math.ceil(below * FRACTIONS)
      -- In this order: a time since the epoch has no room for the fraction.
      whole = whole + (us - below)
      if fraction >= FRACTIONS then
        whole = whole + 1
        fraction = fraction - FRACTIONS
      end
    end

    -- The bucket, which has a state, is full. By the terms of another node it may not be.
    local function fill()
      if cap < life then
        whole, fraction = now, 0
        move(-cap)
        accrued = now - whole - fraction / FRACTIONS
        full = accrued >= cap
        had, dirty, gone, known_expiry = true, true, false, false
      else
        had, dirty, gone = false, false, true
      end
      restated, carried = false, false
    end

    -- Decides so many requests to the bucket at hand; tells how many are granted.
    function decide(count)
      local granted, had_state = 0, had
      while granted < count and -accrued - SLACK <= max_wait and cost - accrued - SLACK <= max_debt do
        if not had or restated or full then
          whole, fraction = now, 0
          move(cost - accrued)
          if restated then known_expiry = false end
          had, restated = true, false
        else
          -- As move(cost) would.
          fraction = fraction + cost_fraction
          whole = whole + cost_whole
          if fraction >= FRACTIONS then
            whole = whole + 1
            fraction = fraction - FRACTIONS
          end
        end
        accrued = now - whole - fraction / FRACTIONS
        full = accrued >= cap
        if full then accrued = cap end
        granted = granted + 1
      end
      if granted > 0 then carried = false end
      if granted > 0 and cost < 0 and full then
        had = had_state
        if had then fill() end
      elseif granted > 0 then
        dirty, gone = true, false
      end
      if granted < count then
        -- A refusal changes nothing, but what it says of a state under other limits is kept.
        if restated and full then
          fill()
        elseif restated then
          carried = carried and accrued < -max_debt
          whole, fraction, restated = now, 0, false
          move(-accrued)
          dirty, known_expiry = true, false
        elseif rewrite and had then
          dirty = true
        end
      end
      return granted
    end
  end

  for _, one in ipairs(unusual or {}) do
    local asked
    key, asked = one[1], one[2]
    load()
    local was_full = full
    told[one[4]] = accrued
    local granted = decide(asked)
    if granted > 0 and was_full and cost > 0 then granted = granted + CREATED end
    outcomes[one[3]] = granted
    store()
    key = 0
  end
  if size == 0 then
    if key == 0 then
      key = run_key
      load(ARGV[twin])
    end
    local known, removed, live = true, 0, 0
    local elsewhere = values[key + 1] == ELSEWHERE
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
      local was_full = full
      local granted = decide(count)
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
      elseif granted > 0 and was_full and cost > 0 then
        outcome = outcome + CREATED
      end
    end
    answers, tell = answers + 1, tell + 1
    outcomes[answers] = outcome
    told[tell] = met
    if counted then
      told[tell + 1], told[tell + 2] = removed, live
      tell = tell + 2
    end
  end
end
if key > 0 then store() end
return { string.char(unpack(outcomes)), pack('<' .. string.rep('d', tell), unpack(told)), strange }
