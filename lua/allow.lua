-- Decides a batch of requests to buckets. Mirrors domain::algorithm::decide (domain::bucket and
-- domain::window) and store::memory: the same operations in the same order on the same doubles. Change
-- the two together.
--
-- Atomic because a balance is read, judged and moved in one step, and because the number of
-- dynamic buckets of a namespace must be exact over all nodes. Each bucket is read once and
-- written once. The runs of one bucket are decided in their order.
--
-- KEYS     the states of the buckets, then registers. A register is a sorted set with the names
--          of a namespace's dynamic buckets; see "Registers". In a cluster no key is declared,
--          because a call may declare keys of one slot only: the keys are the last ones of ARGV.
-- ARGV[1]  little-endian doubles: the time in µs since the epoch, for tests (0: the server's own
--          TIME); the number of states among the keys; the number of keys in ARGV; then for each
--          of the terms that the requests use:
--            cap        µs in which an empty bucket fills
--            max_debt   µs
--            mark       a fingerprint of the limits, a whole number below 2^29
--            idle       µs after its last use at which a bucket is removed; negative: never
--            grid       µs, a power of two: see "Expiry"
--            life       µs after its balance was zero for which a state is needed: cap, or more
--                       where nodes hold tokens of the bucket themselves
--            flags      REWRITE 1: see "Expiry"; ENROLL 2, only with REWRITE: see "Registers";
--                       WINDOW 4, with SLIDING 8, LOG 16 or BAN 32: see "Windows" and "Bans"
--            register   the index of the namespace's register among the keys; 0: the namespace has
--                       one, but not in this call; -1: it needs none
--            bound      with a register, the most names in it; with -1, the time in µs until
--                       which buckets without a state may be decided
-- ARGV[2]  the requests. A run is up to 126 equal requests to one bucket. Runs with equal terms and
--          costs form a group. '<I2I2dd' begins a group:
--            terms      index of the terms, from 1
--            size       number of runs, each of the next key, followed by as many bytes: the number
--                       of requests in each run. 0: a single run, followed by '<I2I2': the index of
--                       its key, and the number of requests. Runs with the same key are adjacent.
--            cost       of the tokens of one request, in µs of accrual; negative: tokens are put
--                       back
--            max_wait   µs; negative: so much accrual must be there, of a window so many tokens; infinite:
--                       always granted, whatever the debt, down to MAX_SPAN; of a window see "Windows"
--
-- Reply: a string. For each run a byte and a double, then a double for each register.
--   Byte: the number of requests granted, which are the first ones; plus 127 if the bucket was full
--   before. 254: the bucket has no state, and there is no place in the register, or no register in
--   this call. 255: the server can't read the key or the register. Nothing was changed for runs
--   with 254 and 255.
--   Double of a run: the balance before its first request, in µs of accrual. After a run of requests to a
--   window follow another byte, 0, and a double: if not all were granted, how many µs until the next one
--   would be, -1 for never; else 0.
--   Double of a register: the number of names in it; -1: no bucket of the call needed to know it.
--
-- State. 12 bytes, '<I6I6': the whole µs at which the balance is zero, modulo 2^48; and from the
-- lowest bit 18 bits of fraction, the upper 6 bits of the mark, one bit that says that a debt beyond
-- the limit is owed (from other limits, or settled), the lower 23 bits of the mark. A value of any other
-- type or length counts as absent. A full bucket and an absent one are the same.
--
-- Windows. Where at most `cap` tokens are granted within a window, the balance is what is left of them, so
-- that costs are in tokens. `grid` is how long a count matters from the start of its window, in µs: the
-- length of a window, and twice that for one that slides; `life` is cap, `max_debt` 0. The state has 14 bytes,
-- '<I6I4I4': a time within the window, in µs modulo 2^48, the tokens granted in it, and those granted in the
-- window before. Requests with an infinite max_wait count even if they are refused, except by LOG; then the
-- balance may be negative, and they are not told when to ask again. The state of LOG is a log of lua/log.lua,
-- and `grid` the window. It expires when it matters no more.
--
-- Bans. What is asked for of a bucket is a window, too, that begins with its first request. `life` is its length,
-- `mark` how long from its start everything is refused once more than `cap` was asked for, `grid` how long the state is
-- kept from then. The request that exceeds `cap` counts, those after it do not. The double of a run is negative during a
-- ban. The state is that of a window, with 0 for the window before.
--
-- States of different forms have different keys, so that nodes with different algorithms for a bucket do not
-- overwrite each other's.
--
-- Expiry. A state may outlive the time at which its bucket is full. It expires at the next step of
-- the grid after that. A grant that does not pass a step leaves the expiry as it is, which saves a
-- third of the cost. REWRITE writes the expiry with every decision: while there may be states whose
-- expiry was computed from other limits, or if a bucket may become idle before it is full. A state with a
-- debt beyond the limit, which lasts longer than nodes reckon with, is written with every decision, too.
--
-- Registers. A bucket of a bounded namespace is in the register as long as it has a state. So a
-- bucket with a state is decided without the register, and one without a state needs a place there.
-- A bucket's name in it is the end of the bucket's key, without the brace.
-- A name's score is a time in ms at which its state may have expired: the state's expiry when it
-- was created, which later requests extend without telling the register. Nodes make room by looking
-- at the names with the lowest scores (lua/register.lua). A name whose state was deleted stays until
-- a node that makes room looks at it: no call of this script removes a name, as another node may be
-- about to create its state. ENROLL also registers buckets that have a state: after the register was
-- lost, and after a namespace became bounded. New names are added at the end of the call, all at once.
--
-- Why some things look odd:
--  * Costs, in instructions of Redis: a step of Lua 50, a call into C 300 to 1,000, a command 3,500
--    to 5,500, a number that becomes text 3,000. A function that uses locals around it costs as much as
--    a command, in each call of the script. x - x % 1 rounds down.
--  * SETRANGE leaves the expiry alone, and costs two thirds of SET with KEEPTTL.
--  * Redis caches the argument objects of redis.call by index, over all scripts, and reuses them if
--    they are large enough. SET stores the object at index 2 as the value: a larger one there, such
--    as a name, would cost each bucket 16 bytes or more. Argument 2 is therefore a dummy: the
--    never-existing key '' for MGET, the option CH for ZADD. (ZSCORE and register.lua break this for
--    one bucket a call.)

local TERMS, GROUP, SINGLE, STATE, WINDOW = '<ddddddddd', '<I2I2dd', '<I2I2', '<I6I6', '<I6I4I4'
local HEADER_BYTES, TERMS_BYTES, STATE_BYTES, WINDOW_BYTES = 24, 72, 12, 14
-- Bytes of the reply.
local FULL, NO_PLACE, UNREADABLE = 127, 254, 255
local FRACTIONS, SLACK, TIME_MODULUS, HALF = 262144, 0.00390625, 281474976710656, 140737488355328
-- What CARRIED adds to the upper 30 bits of the second half of a state.
local CARRIED = 16777216
-- The longest debt that can be stored, in µs: four years.
local MAX_SPAN = 126230400000000
-- The first expiry of a register, in seconds: 30 days.
local REGISTER_KEPT = 2592000
-- How the error begins that says that a key has another type.
local WRONG_TYPE = '^WRONGTYPE '

local call, pcall, pack, unpack_bytes = redis.call, redis.pcall, struct.pack, struct.unpack
local numbers, groups = ARGV[1], ARGV[2]

-- The rate in a state's upper 30 bits, in tokens a second: the mark's upper 6 bits are the exponent;
-- of its lower 23 bits the upper 18 are the mantissa, the lower 5 a hash of the debt limit or the queue.
local function rate(upper)
  local exponent = upper % 16777216 / 262144
  local rest = (upper - upper % 33554432) / 33554432
  return math.ldexp(1 + math.floor(rest / 32) / 262144, exponent - 32)
end

-- Splits the time since the balance was zero into whole µs, rounded up, and the excess in units of
-- 2^-18 µs.
local function since_zero(accrued)
  local over = -accrued % 1
  local since, part = accrued + over, math.ceil(over * 262144)
  if part >= 262144 then return since - 1, part - 262144 end
  return since, part
end

local now, states, undeclared = unpack_bytes('<ddd', numbers)
local keys = KEYS
if undeclared > 0 then keys = { unpack(ARGV, #ARGV - undeclared + 1) } end
if states > #keys then states = #keys end
local simulated = now ~= 0
if not simulated then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

-- The state of key i is at i + 1. false: absent; a table: the server can't read it.
local values
if undeclared == 0 and states > 1 then
  values = call('MGET', keys[1], '', unpack(keys, 2, states))
  values[2] = values[1]
else
  values = { false }
  for i = 1, states do
    local value = pcall('GET', keys[i])
    values[i + 1] = (type(value) == 'string' or value and not string.find(value.err, WRONG_TYPE)) and value
  end
end
if simulated then
  for i = 1, states do
    local expires_ms = call('PEXPIRETIME', keys[i])
    if expires_ms >= 0 and math.floor(now / 1000) > expires_ms then values[i + 1] = false end
  end
end

-- The terms in use, with the mark as states have it.
local term = 0
local cap, max_debt, mark, idle, grid, life, flags, register, bound
local rewrite, enroll, lowest, now_to_full, expiry_step, expires_ms
-- Of a window: its length, else nil; whether it slides; and if what is granted is logged: lua/log.lua.
local length, sliding, log
-- The functions of lua/window.lua, if there is a window that is no log.
local windows
-- Of a ban: how long from the start of its window it lasts, else nil.
local lasting
local state_bytes
-- Whether the call has changed anything.
local written = false
-- By index of a register's key, for those that the call uses: how many names it has, at most, or
-- false if the server can't read it; scores and names to be added.
local names_in, added_to = {}, {}

-- For each run two: the byte and the double of the reply.
local replies, n = {}, 0
local at, index = 1, 0
while at <= #groups do
  -- The cost of one request, also in whole µs and fractions.
  local run_term, size, cost, max_wait
  run_term, size, cost, max_wait, at = unpack_bytes(GROUP, groups, at)
  local cost_whole = cost - cost % 1
  local cost_part = math.ceil((cost - cost_whole) * FRACTIONS)
  local is_unlimited = max_wait == math.huge
  local counts_refused = cost >= 0 and is_unlimited
  if run_term ~= term then
    term = run_term
    cap, max_debt, mark, idle, grid, life, flags, register, bound =
      unpack_bytes(TERMS, numbers, HEADER_BYTES + (term - 1) * TERMS_BYTES + 1)
    rewrite, enroll, sliding = flags % 2 == 1, flags % 4 >= 2, flags % 16 >= 8
    lasting = flags >= 32 and mark or nil
    length = flags >= 4 and (lasting and life or sliding and grid / 2 or grid) or nil
    log = flags % 32 >= 16 and (log or new_log()) or nil
    if length and not log then windows = windows or new_windows() end
    state_bytes = length and WINDOW_BYTES or STATE_BYTES
    lowest, now_to_full, expiry_step = -max_debt - 1, now + life, nil
    -- From 29 bits to where they are in a state.
    local low = mark % 8388608
    mark = (mark - low) / 8388608 * FRACTIONS + low * 2 * CARRIED
  end
  if length then is_unlimited = false end
  -- The lowest balance at which a request is granted.
  local min_balance = is_unlimited and -math.huge or math.max(-max_wait, cost - max_debt) - SLACK
  -- Of a window: the limit without what a grant must leave.
  local most = length and cap - math.max(-max_wait - cost, 0)
  -- The first request to a full bucket makes it zero so long ago.
  local first_since, first_part = since_zero(cap - cost)

  local counts, single
  if size == 0 then
    index, single, at = unpack_bytes(SINGLE, groups, at)
    index, size = index - 1, 1
  else
    counts = { string.byte(groups, at, at + size - 1) }
    at = at + size
  end
  -- For each bucket of the group: its place, its balance, how many requests are granted, the write.
  for i = 1, size do
    index = index + 1
    -- granted: the number of requests, or another byte of the reply. score: in the register, if it was
    -- looked up.
    local value, asked, granted, score, balance = values[index + 1], single or counts[i], nil, nil, 0
    -- Of a window: when the next request would be granted.
    local retry = 0

    -- 1. Place: a bucket without a state needs one in the register.
    if not value or #value ~= state_bytes and not (log and type(value) == 'string' and log.is_log(value)) then
      if type(value) == 'table' then
        granted = UNREADABLE
      elseif register < 0 then
        if now > bound then granted = NO_PLACE end
      elseif register == 0 then
        granted = NO_PLACE
      else
        local names = names_in[register]
        if names == nil then
          names = pcall('ZCARD', keys[register])
          if type(names) == 'table' then
            local foreign = string.find(names.err, WRONG_TYPE)
            local deleted = foreign and pcall('DEL', keys[register])
            names = type(deleted) == 'number' and 0 or false
          end
          -- Some of those that are to be added may be there already.
          if names and added_to[register] then names = names + #added_to[register] / 2 end
          names_in[register] = names
        end
        if names == bound then
          score = pcall('ZSCORE', keys[register], string.sub(keys[index], #keys[register] + 1, -2))
        end
        if not names or score and type(score) == 'table' then
          granted = UNREADABLE
        elseif names >= bound and not score then
          granted = NO_PLACE
        end
      end
      value = false
    end

    if not granted then
      -- 2. Balance. It was zero `since` µs ago, or rather `part` fractions less. restated: a state must
      -- be written anew to say so under these terms; carried: a debt beyond the limit is kept.
      local since, part, restated, carried, full_at_before
      local moment, start, state_at, current, previous, is_of_this_window, own_at
      balance = cap
      local logged
      if length then
        if log then
          logged, moment = value or '', now
          if value then
            own_at = log.last_at(value)
            -- The clock may have stepped back, by an hour at most.
            if own_at > now + 3600000000 then logged = '' else moment = math.max(now, own_at) end
          end
          balance = math.max(cap - log:hits(logged, length, moment), 0)
          since, part = balance, 0
        elseif lasting then
          state_at, current, is_of_this_window, own_at = windows.asked_before(value, now, length, lasting, cap)
          start, previous = state_at, 0
          balance = cap - current
          since, part = balance, 0
        else
          moment, start, state_at, current, previous, is_of_this_window, own_at =
            windows.counts(value, now, length)
          local used = current
          if sliding then used = used + math.floor(previous * (start + length - moment) / length) end
          balance = cap - used
          if balance < 0 and not counts_refused then balance = 0 end
          since, part = balance, 0
        end
      elseif value then
        local zero, rest = unpack_bytes(STATE, value)
        since = (now - zero) % TIME_MODULUS
        if since >= HALF then since = since - TIME_MODULUS end
        part = rest - mark
        if part < 0 or part >= FRACTIONS then
          part = rest % FRACTIONS
          local old_mark = rest - part
          carried = old_mark % (2 * CARRIED) >= CARRIED
          if carried then old_mark = old_mark - CARRIED end
          balance = since - part / FRACTIONS
          if old_mark ~= mark then
            local old_rate, new_rate = rate(old_mark), rate(mark)
            if old_rate ~= new_rate then
              balance = balance * (old_rate / new_rate)
            end
            restated, carried = true, true
          end
          if balance < -MAX_SPAN then balance, restated = -MAX_SPAN, true end
        else
          balance = since - part / FRACTIONS
          if balance < lowest then balance, restated = -max_debt, true end
        end
        if not restated and not carried then full_at_before = now_to_full - since end
      end
      local full = balance >= cap
      if full then balance = cap end

      -- 3. Grant.
      granted = 0
      if balance >= min_balance then
        -- The first request sets the time of zero if the state does not tell it exactly.
        local first = 0
        if full then
          first, since, part = 1, first_since, first_part
        elseif restated then
          first, since, part = 1, since_zero(balance - cost)
        end
        granted = 1
        if asked > 1 then
          -- A request is granted if those before it leave enough. Nearly always all are.
          local high, probe = asked, asked
          while granted < high do
            local parts = part + (probe - 1 - first) * cost_part
            local over = parts % FRACTIONS
            local taken = (probe - 1 - first) * cost_whole + (parts - over) / FRACTIONS
            if since - taken - over / FRACTIONS >= min_balance then
              granted = probe
            else
              high = probe - 1
            end
            probe = math.ceil((granted + high) / 2)
          end
        end
        part = part + (granted - first) * cost_part
        since = since - (granted - first) * cost_whole
        if part >= FRACTIONS then
          local over = part % FRACTIONS
          since, part = since - (part - over) / FRACTIONS, over
        end
      elseif restated and not full then
        -- A refusal changes nothing, but what it says of a state under other limits is kept.
        since, part = since_zero(balance)
        carried = carried and balance < -max_debt
      end

      -- 4. Write.
      local was_full = full
      if granted > 0 then
        carried = false
        if is_unlimited then
          if since - part / FRACTIONS < -MAX_SPAN then since, part = -MAX_SPAN, 0 end
          carried = since - part / FRACTIONS < -max_debt
        end
        if full or cost <= 0 then full = since - part / FRACTIONS >= cap end
      end
      local changed = granted > 0 or restated
      -- The state to write, and whether its expiry stays; or whether the key is deleted.
      local state, keeps_expiry, step, gone
      if length then
        if log then
          if granted > 0 then
            if cost < 0 then
              logged = log:take_back(logged, length, moment, -granted * cost)
            else
              logged = log:add(logged, length, cap, moment, granted * cost)
            end
          end
          if granted < asked then
            local room_at = log:room_at(logged, length, most, moment, cost)
            -- A log that was corrupted may have any times, and the node must get a time that it can believe.
            retry = room_at and math.min(math.max(room_at - now, 0), 2 * length + 3600000000) or -1
          end
          if granted > 0 and logged == '' then
            gone = value
          elseif granted > 0 or value and rewrite then
            state = granted > 0 and logged or value
            step = log.last_at(state) + 1
          end
        else
          local counted = counts_refused and asked or granted
          if lasting and balance >= 0 then counted = math.min(granted + 1, asked) end
          current = math.min(math.max(current + counted * cost, 0), 4294967295)
          if counts_refused then
            retry = -1
          elseif granted < asked then
            retry = lasting and start + lasting - now
              or windows.room_after(now, moment, start, length, sliding, most, cost, current, previous)
          end
          if counted > 0 and cost ~= 0 then
            state = pack(WINDOW, state_at % TIME_MODULUS, current, previous)
            keeps_expiry, step = is_of_this_window and not rewrite, start
          elseif value and rewrite then
            state, step = value, lasting and own_at or own_at - own_at % length
          end
        end
      elseif changed and full and not (value and cap < life) then
        -- A full bucket needs no state, unless it may not be full by the terms of another node.
        gone = value
      elseif changed or value and (rewrite or carried) then
        if changed and full then
          since, part = since_zero(cap)
          full_at_before, carried = nil, false
        end
        local full_at, rest = now_to_full - since, mark + part
        if carried then rest = rest + CARRIED end
        state = pack(STATE, (now - since) % TIME_MODULUS, rest)
        step = full_at - full_at % grid
        keeps_expiry = full_at_before and not rewrite
          and step == full_at_before - full_at_before % grid
      end
      -- The error if the server refuses the write.
      local failed
      if keeps_expiry then
        local reply = pcall('SETRANGE', keys[index], '0', state)
        -- The value had this length.
        if reply == #state then
          written, value = true, state
        else
          failed = reply
        end
      elseif state then
        if step ~= expiry_step then
          -- In a batch many expire together, and Redis takes long to make text of a number.
          expiry_step, expires_ms = step, math.ceil((step + grid) / 1000)
          if idle >= 0 then expires_ms = math.min(expires_ms, math.ceil((now + idle) / 1000)) end
          expires_ms = string.format('%.0f', expires_ms)
        end
        local until_ms = expires_ms
        if length and rewrite and value then
          -- Nodes with longer windows may still need the state.
          local kept_ms = pcall('PEXPIRETIME', keys[index])
          if type(kept_ms) == 'number' then
            until_ms = string.format('%.0f', math.max(tonumber(expires_ms), kept_ms))
          else
            failed = kept_ms
          end
        end
        local reply = failed or pcall('SET', keys[index], state, 'PXAT', until_ms)
        if reply.ok then
          if register > 0 and (enroll or not value) then
            local added = added_to[register] or {}
            added[#added + 1] = expires_ms
            added[#added + 1] = string.sub(keys[index], #keys[register] + 1, -2)
            added_to[register] = added
            -- A name with a place does not count twice.
            if names_in[register] and not score then
              names_in[register] = names_in[register] + 1
            end
          end
          written, value = true, state
        else
          failed = reply
        end
      elseif gone then
        local reply = pcall('DEL', keys[index])
        if type(reply) == 'number' then
          written, value = true, false
        else
          failed = reply
        end
      end
      if failed then
        -- The slot is being moved and the key is not here, or the user may not write it, or lacks the
        -- command. If another run was written, only this run fails: an error would make the node send
        -- all again.
        if not written then error(failed) end
        granted, balance = UNREADABLE, 0
      end

      if single then values[index + 1] = value end
      if was_full and cost > 0 and granted > 0 and granted < FULL then granted = granted + FULL end
    end
    replies[n + 1], replies[n + 2] = granted, balance
    n = n + 2
    if length then
      replies[n + 1], replies[n + 2] = 0, retry
      n = n + 2
    end
  end
end

local format = string.rep('Bd', n / 2)
for i = states + 1, #keys do
  local added, names = added_to[i], -1
  if added then pcall('ZADD', keys[i], 'CH', unpack(added)) end
  if added or names_in[i] then names = pcall('ZCARD', keys[i]) end
  if type(names) ~= 'number' then
    names = -1
  elseif added and names <= #added / 2 then
    -- The register is new. Nodes renew its expiry.
    pcall('EXPIRE', keys[i], REGISTER_KEPT)
  end
  n, format = n + 1, format .. 'd'
  replies[n] = names
end
return pack('<' .. format, unpack(replies))
