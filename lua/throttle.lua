-- A request for hits of a domain on a resource. Mirrors server/src/domain/throttle.rs.
-- Atomic, because the hits that are granted depend on all that were granted before. lua/guard.lua goes
-- around it, and lua/parts.lua calls it for many requests at once.
--
-- KEYS[1]  the history of the domain on the resource
-- KEYS[2]  if hits of all domains are limited: their history on the resource
-- ARGV[1]  doubles: the time in µs, 0 for the server's own; the hits asked for; the least number; the most
--          hits in a second of the domain, and of all domains, -1 for no limit; 1 if only a domain with a
--          history may be granted hits; and for each tier: limit, window, active time, cooldown (µs), 1 if it
--          is skippable
--
-- Reply: the hits granted; the number of the current tier, 0 for none; the hits in its window; 1 if a tier
-- was entered; after a refusal how many µs until the least number could be granted, -1 for never; 1 if a
-- corrupt history was replaced; the hits in the last second of the domain and of all domains, 0 without a
-- limit; 1 if the domain's limit leaves the least room and less than the tiers, or 0; the same for the
-- limit of all domains; 1 if it was refused only because the domain has no history.
--
-- State: '<BI7', the number of logs and the time of the last hit in µs; for each log '<I7I2', when its tier was
-- last entered, 0 for never, and its bytes; then the logs: first that of the last second, then by tier. lua/log.lua
-- says what a log is. The key expires when it can't decide anything any more. Logs that the limits lack are
-- kept, and with them what the key had left.

-- Making a function that uses locals around it takes Redis as long as a command. So they are made here, once for
-- all parts of a call.

local call, unpack_bytes, logging = redis.call, struct.unpack, new_log()
local HEADER_BYTES, TIER_BYTES = 48, 40
-- How far ahead of the server's clock, in µs, the last hit of a domain, and of all domains, may be: the clock may
-- have stepped back.
local AHEAD, ALL_AHEAD = 3600000000, 1000000

-- The history of a key: `logs` by number, from 1 for that of the last second, and `now`, the time of the
-- request, which is not before the last hit. `logs` are those of the limits. A history that is further
-- ahead than `ahead` counts as absent.
local function read(key, logs, ahead, asked_at, simulated, corrupt)
  local value = not corrupt and call('GET', key)
  if simulated and value then
    local expires_ms = call('PEXPIRETIME', key)
    if expires_ms >= 0 and math.floor(asked_at / 1000) > expires_ms then value = false end
  end
  local history = { key = key, logs = logs, limited = #logs, now = asked_at, is_known = false }
  if not value then return history end
  local known, last = unpack_bytes('<BI7', value)
  if last > asked_at + ahead then return history end
  history.now, history.is_known = math.max(asked_at, last), true
  local log_at = 9 + known * 9
  for i = 1, known do
    local entered, length = unpack_bytes('<I7I2', value, 9 + (i - 1) * 9)
    local tier = logs[i] or {}
    tier.entered, tier.log = entered, string.sub(value, log_at, log_at + length - 1)
    assert(entered <= last and length == #tier.log)
    assert(length == 531 or length % 7 == 0 and length <= 7 * 128)
    logs[i] = tier
    log_at = log_at + length
  end
  return history
end

-- The log of hits within a second: it is active for as long as its times are exact, 366 days.
local function second(limit)
  return { limit = limit, window = 1000000, active = 31622400000000, cooldown = 0, entered = 0, log = '' }
end

-- A tier that is neither active nor cooling down is inactive.
local function is_active(tier, at) return tier.entered > 0 and at < tier.entered + tier.active end
local function is_cooling(tier, at)
  local over = tier.entered + tier.active
  return tier.entered > 0 and at >= over and at < over + tier.cooldown
end

local function current_at(tiers, at)
  for i = #tiers, 1, -1 do
    if is_active(tiers[i], at) then return i end
  end
  return 0
end

-- The indexes of the tiers above `current` that a large enough burst enters at a time, in order.
local function enterable(tiers, current, at)
  local indexes = {}
  for i = current + 1, #tiers do
    local tier = tiers[i]
    if tier.limit > 0 and not is_cooling(tier, at) then
      indexes[#indexes + 1] = i
    elseif not tier.skippable then
      break
    end
  end
  return indexes
end

-- Adds hits to the log of a tier, after entering it if it is not active. Returns whether it is entered, and the
-- hits in its window then.
local function add(tier, hits, now)
  local enters = not is_active(tier, now)
  if enters then tier.entered, tier.log = now, '' end
  tier.log, hits = logging:add(tier.log, tier.window, tier.limit, now, hits)
  return enters, hits
end

local function write(history)
  local logs, ends, known = history.logs, 0, 0
  for i, tier in ipairs(logs) do
    if tier.entered > 0 then
      known = i
      if i == 1 then
        ends = math.max(ends, history.now + 1000000)
      elseif i <= history.limited then
        ends = math.max(ends, tier.entered + tier.active + tier.cooldown)
      end
    end
  end
  local expires_ms = math.ceil(ends / 1000)
  if #logs > history.limited then
    expires_ms = math.max(expires_ms, call('PEXPIRETIME', history.key))
  end
  local parts = { struct.pack('<BI7', known, history.now) }
  for i = 1, known do parts[i + 1] = struct.pack('<I7I2', logs[i].entered, #logs[i].log) end
  for i = 1, known do parts[known + i + 1] = logs[i].log end
  call('SET', history.key, table.concat(parts), 'PXAT', expires_ms)
end

-- The first time, from `at` on, when the log of a second has room for the least number.
local function second_room_at(log, at, least)
  if not log or log.limit < 0 then return at end
  if is_active(log, at) then return logging:room_at(log.log, log.window, log.limit, at, least) end
  if least <= log.limit then return at end
end

-- When the tiers could take the least number of hits, from `start` on; nil: never.
local function retry_at(tiers, start, least)
  local changes = { start }
  for _, tier in ipairs(tiers) do
    if tier.entered > 0 then
      local over = tier.entered + tier.active
      if over > start then changes[#changes + 1] = over end
      if over + tier.cooldown > start then changes[#changes + 1] = over + tier.cooldown end
    end
  end
  table.sort(changes)
  for n, from in ipairs(changes) do
    local current, needed = current_at(tiers, from), least
    for _, i in ipairs(enterable(tiers, current, from)) do needed = needed - tiers[i].limit end
    local at
    if needed <= 0 then
      at = from
    elseif current > 0 then
      local tier = tiers[current]
      at = logging:room_at(tier.log, tier.window, tier.limit, from, needed)
    end
    if at and (not changes[n + 1] or at < changes[n + 1]) then return at end
  end
end

local function run(corrupt, KEYS, ARGV, server_time)
  local numbers = ARGV[1]
  local now, copies, least, hard, global, known_only = unpack_bytes('<dddddd', numbers)
  local simulated = now ~= 0
  if not simulated then now = server_time end
  local asked_at = now

  local of_domain, tiers = second(hard), {}
  local logs = { of_domain }
  for i = 1, (#numbers - HEADER_BYTES) / TIER_BYTES do
    local limit, window, active, cooldown, skippable =
      unpack_bytes('<ddddd', numbers, HEADER_BYTES + (i - 1) * TIER_BYTES + 1)
    tiers[i] = { limit = limit, window = window, active = active, cooldown = cooldown,
      skippable = skippable == 1, entered = 0, log = '' }
    logs[i + 1] = tiers[i]
  end
  local history = read(KEYS[1], logs, AHEAD, asked_at, simulated, corrupt)
  now = history.now
  -- Where the clock has stepped back, all domains must not wait for it, so their time is their own.
  local of_all, all_history, all_now
  if global >= 0 then
    of_all = second(global)
    all_history = read(KEYS[2], { of_all }, ALL_AHEAD, asked_at, simulated, corrupt)
    all_now = all_history.now
  end

  local domain_hits, all_hits = 0, 0
  if hard >= 0 and is_active(of_domain, now) then
    domain_hits = logging:hits(of_domain.log, 1000000, now)
  end
  if of_all and is_active(of_all, all_now) then
    all_hits = logging:hits(of_all.log, 1000000, all_now)
  end
  local hard_room = hard < 0 and math.huge or math.max(hard - domain_hits, 0)
  local global_room = global < 0 and math.huge or math.max(global - all_hits, 0)

  local current = current_at(tiers, now)
  -- What is granted is added up: `copies` may be too large for a difference to be exact. `taken`: for each tier its
  -- index, and how many hits it takes.
  local used, fitting, taken = 0, 0, {}
  if current > 0 then
    used = logging:hits(tiers[current].log, tiers[current].window, now)
    fitting = math.min(copies, math.max(tiers[current].limit - used, 0))
    taken[1], taken[2] = current, fitting
  end
  if fitting < copies and current < #tiers then
    for _, i in ipairs(enterable(tiers, current, now)) do
      local hits = math.min(copies - fitting, tiers[i].limit)
      taken[#taken + 1], taken[#taken + 2] = i, hits
      fitting = fitting + hits
      if fitting >= copies then break end
    end
  end
  local granted = math.min(fitting, hard_room, global_room)
  local by_hard = hard_room < fitting and hard_room == granted and 1 or 0
  local by_global = global_room < fitting and global_room == granted and 1 or 0
  local replaced = corrupt and 1 or 0

  if granted < least then
    local domain_at, all_at = second_room_at(of_domain, now, least), second_room_at(of_all, all_now or asked_at, least)
    local at = domain_at and all_at and retry_at(tiers, math.max(domain_at, all_at), least)
    local after = at and at - asked_at or -1
    return { 0, current, used, 0, after, replaced, domain_hits, all_hits, by_hard, by_global, 0 }
  end
  if known_only == 1 and not history.is_known then
    return { 0, 0, 0, 0, -1, replaced, domain_hits, all_hits, 0, 0, 1 }
  end

  local burst, reached, hits, left = 0, 0, 0, granted
  for n = 1, #taken, 2 do
    local tier, part = tiers[taken[n]], math.min(taken[n + 1], left)
    if part > 0 then
      left = left - part
      local enters, in_window = add(tier, part, now)
      if enters then burst = 1 end
      reached, hits = taken[n], in_window
    end
  end
  if hard >= 0 then
    add(of_domain, granted, now)
    domain_hits = domain_hits + granted
  end
  if of_all then
    add(of_all, granted, all_now)
    all_hits = all_hits + granted
  end

  write(history)
  if of_all then write(all_history) end
  return { granted, reached, hits, burst, -1, replaced, domain_hits, all_hits, by_hard, by_global, 0 }
end
