-- A request for hits of a domain on a resource. Mirrors server/src/domain/throttle.rs.
-- Atomic, because the hits that are granted depend on all that were granted before. lua/guard.lua goes
-- around it, and lua/parts.lua calls it for many requests at once.
--
-- Keys:
--   1  the history of the domain on the resource
--   2  if hits of all domains are limited: their history on the resource
-- Arguments, as doubles:
--   1  the time in µs, 0 for the server's own; the hits asked for; the least number
--   2  the limits: the most hits in a second of the domain, and of all domains, -1 for no limit; 1 if only a
--      domain with a history may be granted hits; and for each tier: limit, window, active time, cooldown (µs), 1
--      if it is skippable
--
-- Reply, as doubles: the hits granted; the number of the current tier, 0 for none; the hits in its window; 1 if a
-- tier was entered; after a refusal how many µs until the least number could be granted, -1 for never; 1 if a
-- corrupt history was replaced; the hits in the last second of the domain and of all domains, 0 without a
-- limit; 1 if the domain's limit leaves the least room and less than the tiers, or 0; the same for the
-- limit of all domains; 1 if it was refused only because the domain has no history.
--
-- State: '<BI7', the number of logs and the time of the last hit in µs; for each log '<I7I2', when its tier was
-- last entered, 0 for never, and its bytes; then the logs: first that of the last second, then by tier. lua/log.lua
-- says what a log is. The key expires when it can't decide anything any more. Logs that the limits lack are
-- kept, and with them what the key had left.

-- Making a function that uses locals around it takes Redis as long as a command, so they are made once for all
-- parts of a call. A table takes half as long: those of limits are used again by parts with the same ones.

local call, unpack_bytes, pack, logging = redis.call, struct.unpack, struct.pack, new_log()
local min, max, ceil, sub = math.min, math.max, math.ceil, string.sub
local HEADER_BYTES, TIER_BYTES = 24, 40
-- How far ahead of the server's clock, in µs, the last hit of a domain, and of all domains, may be: the clock may
-- have stepped back.
local AHEAD, ALL_AHEAD = 3600000000, 1000000

-- The log of hits within a second: it is active for as long as its times are exact, 366 days.
local function second(limit)
  return { limit = limit, window = 1000000, active = 31622400000000, cooldown = 0, entered = 0, log = '' }
end

-- By how they are written: limits, with a table for each log, which `read` fills.
local limits_of = {}
local function read_limits(text)
  local hard, global, known_only = unpack_bytes('<ddd', text)
  local logs, tiers = { second(hard) }, {}
  for i = 1, (#text - HEADER_BYTES) / TIER_BYTES do
    local limit, window, active, cooldown, skippable =
      unpack_bytes('<ddddd', text, HEADER_BYTES + (i - 1) * TIER_BYTES + 1)
    tiers[i] = { limit = limit, window = window, active = active, cooldown = cooldown,
      skippable = skippable == 1, entered = 0, log = '' }
    logs[i + 1] = tiers[i]
  end
  local limits = { hard = hard, global = global, known_only = known_only == 1, logs = logs, tiers = tiers,
    of_all = global >= 0 and { second(global) } or nil }
  limits_of[text] = limits
  return limits
end

-- Reads the history of a key into `logs`, the first of which is that of the last second. Returns the time of
-- the request, which is not before the last hit; whether there is a history; and a list of logs that `logs`
-- lacks, or nil. A history that is further ahead than `ahead` counts as absent.
local function read(key, logs, ahead, asked_at, simulated, corrupt)
  local value = not corrupt and call('GET', key)
  if simulated and value then
    local expires_ms = call('PEXPIRETIME', key)
    if expires_ms >= 0 and math.floor(asked_at / 1000) > expires_ms then value = false end
  end
  local known, last = 0, 0
  if value then
    known, last = unpack_bytes('<BI7', value)
    if last > asked_at + ahead then value, known = false, 0 end
  end
  for i = known + 1, #logs do logs[i].entered, logs[i].log = 0, '' end
  if not value then return asked_at, false end
  local others
  local log_at = 9 + known * 9
  for i = 1, known do
    local entered, length = unpack_bytes('<I7I2', value, i * 9)
    if entered > last or length ~= 531 and (length % 7 ~= 0 or length > 896) then error('no history') end
    local log = logs[i]
    if not log then
      log = {}
      others = others or {}
      others[#others + 1] = log
    end
    log.entered, log.log = entered, length > 0 and sub(value, log_at, log_at + length - 1) or ''
    log_at = log_at + length
  end
  if log_at > #value + 1 then error('no history') end
  return max(asked_at, last), true, others
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

-- Adds hits to the log of a tier, after entering it if it is not active. `before`: the hits in its window, if they
-- are known. Returns whether it is entered, and the hits in its window then.
local function add(tier, hits, now, before)
  local enters = not is_active(tier, now)
  if enters then tier.entered, tier.log, before = now, '', 0 end
  tier.log, hits = logging:add(tier.log, tier.window, tier.limit, now, hits, before)
  return enters, hits
end

local function write(key, logs, others, now)
  local known, ends = 0, 0
  for i, tier in ipairs(logs) do
    local entered = tier.entered
    if entered > 0 then
      known = i
      local over = i == 1 and now + 1000000 or entered + tier.active + tier.cooldown
      if over > ends then ends = over end
    end
  end
  local expires_ms = ceil(ends / 1000)
  if others then
    known, expires_ms = #logs + #others, max(expires_ms, call('PEXPIRETIME', key))
  end
  local head, bytes = pack('<BI7', known, now), ''
  for i = 1, known do
    local tier = logs[i] or others[i - #logs]
    head, bytes = head .. pack('<I7I2', tier.entered, #tier.log), bytes .. tier.log
  end
  call('SET', key, head .. bytes, 'PXAT', expires_ms)
end

local function reply(...) return pack('<ddddddddddd', ...) end

local function run(corrupt, keys, key, args, arg, server_time)
  local asked_at, copies, least = unpack_bytes('<ddd', args[arg])
  local simulated = asked_at ~= 0
  if not simulated then asked_at = server_time end
  local limits = limits_of[args[arg + 1]] or read_limits(args[arg + 1])
  local hard, global, logs, tiers, of_all = limits.hard, limits.global, limits.logs, limits.tiers, limits.of_all
  local of_domain = logs[1]
  local now, is_known, others = read(keys[key], logs, AHEAD, asked_at, simulated, corrupt)
  -- Where the clock has stepped back, all domains must not wait for it, so their time is their own.
  local all_now, _, all_others
  if of_all then all_now, _, all_others = read(keys[key + 1], of_all, ALL_AHEAD, asked_at, simulated, corrupt) end

  local domain_hits, all_hits = 0, 0
  if hard >= 0 and is_active(of_domain, now) then
    domain_hits = logging:hits(of_domain.log, 1000000, now)
  end
  if of_all and is_active(of_all[1], all_now) then
    all_hits = logging:hits(of_all[1].log, 1000000, all_now)
  end
  local hard_room = hard < 0 and math.huge or max(hard - domain_hits, 0)
  local global_room = global < 0 and math.huge or max(global - all_hits, 0)

  local current = current_at(tiers, now)
  -- What is granted is added up: `copies` may be too large for a difference to be exact. `taken`: for each tier its
  -- index, and how many hits it takes.
  local used, fitting, taken = 0, 0, {}
  if current > 0 then
    used = logging:hits(tiers[current].log, tiers[current].window, now)
    fitting = min(copies, max(tiers[current].limit - used, 0))
    taken[1], taken[2] = current, fitting
  end
  if fitting < copies and current < #tiers then
    for _, i in ipairs(enterable(tiers, current, now)) do
      local hits = min(copies - fitting, tiers[i].limit)
      taken[#taken + 1], taken[#taken + 2] = i, hits
      fitting = fitting + hits
      if fitting >= copies then break end
    end
  end
  local granted = min(fitting, hard_room, global_room)
  local by_hard = hard_room < fitting and hard_room == granted and 1 or 0
  local by_global = global_room < fitting and global_room == granted and 1 or 0
  local replaced = corrupt and 1 or 0

  if granted < least then
    local domain_at = second_room_at(of_domain, now, least)
    local all_at = second_room_at(of_all and of_all[1], all_now or asked_at, least)
    local at = domain_at and all_at and retry_at(tiers, max(domain_at, all_at), least)
    local after = at and at - asked_at or -1
    return reply(0, current, used, 0, after, replaced, domain_hits, all_hits, by_hard, by_global, 0)
  end
  if limits.known_only and not is_known then
    return reply(0, 0, 0, 0, -1, replaced, domain_hits, all_hits, 0, 0, 1)
  end

  local burst, reached, hits, left = 0, 0, 0, granted
  for n = 1, #taken, 2 do
    local tier, part = tiers[taken[n]], min(taken[n + 1], left)
    if part > 0 then
      left = left - part
      local enters, in_window = add(tier, part, now, taken[n] == current and used or nil)
      if enters then burst = 1 end
      reached, hits = taken[n], in_window
    end
  end
  if hard >= 0 then
    add(of_domain, granted, now, domain_hits)
    domain_hits = domain_hits + granted
  end
  if of_all then
    add(of_all[1], granted, all_now, all_hits)
    all_hits = all_hits + granted
  end

  write(keys[key], logs, others, now)
  if of_all then write(keys[key + 1], of_all, all_others, all_now) end
  return reply(granted, reached, hits, burst, -1, replaced, domain_hits, all_hits, by_hard, by_global, 0)
end
