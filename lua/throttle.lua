-- A request for hits of a domain on a resource. Mirrors server/src/domain/throttle.rs and throttle/log.rs.
-- Atomic, because the hits that are granted depend on all that were granted before. lua/guard.lua goes
-- around it.
--
-- KEYS[1]  the history of the domain on the resource
-- ARGV[1]  doubles: the time in µs, 0 for the server's own; the hits asked for; the least number; and for
--          each tier: limit, window, active time, cooldown (µs), 1 if it is skippable
--
-- Reply: the hits granted; the number of the current tier, 0 for none; the hits in its window; 1 if a tier
-- was entered; after a refusal how many µs until the least number could be granted, -1 for never; 1 if a
-- corrupt history was replaced.
--
-- State: '<BI7', the number of tiers and the time of the last hit in µs; for each tier '<I7I2', when it was
-- last entered, 0 for never, and the bytes of its log; then the logs. A log has an I7 for the time of each of
-- up to 128 hits. One with more hits is '<I7I7', the window and the number of the last slot, and 129 I4:
-- the hits up to the end of the slot before the last 128, and of each of these, modulo 2^32. The key expires
-- when the last cooldown ends. Tiers that the limits lack are kept, and with them what the key had left.

local corrupt = ...
local call, pack, unpack_bytes = redis.call, struct.pack, struct.unpack
local EXACT, SLOTS, MODULUS = 128, 128, 4294967296
local HEADER_BYTES, SLOTS_BYTES, SUMS_AT = 24, 530, 15
local TIER_BYTES = 40
-- How far ahead of the server's clock, in µs, a stored time may be: the clock may have stepped back.
local AHEAD = 3600000000

local key, numbers = KEYS[1], ARGV[1]
local now, copies, least = unpack_bytes('<ddd', numbers)
local simulated = now ~= 0
if not simulated then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local tiers = {}
for i = 1, (#numbers - HEADER_BYTES) / TIER_BYTES do
  local limit, window, active, cooldown, skippable =
    unpack_bytes('<ddddd', numbers, HEADER_BYTES + (i - 1) * TIER_BYTES + 1)
  tiers[i] = { limit = limit, window = window, active = active, cooldown = cooldown,
    skippable = skippable == 1, entered = 0, log = '' }
end

local value = not corrupt and call('GET', key)
if simulated and value then
  local expires_ms = call('PEXPIRETIME', key)
  if expires_ms >= 0 and math.floor(now / 1000) > expires_ms then value = false end
end
local asked_at, others = now, {}
if value then
  local known, last = unpack_bytes('<BI7', value)
  assert(last <= now + AHEAD)
  local log_at = 9 + known * 9
  for i = 1, known do
    local entered, length = unpack_bytes('<I7I2', value, 9 + (i - 1) * 9)
    local tier = tiers[i] or {}
    tier.entered, tier.log = entered, string.sub(value, log_at, log_at + length - 1)
    assert(entered <= last and length == #tier.log)
    assert(length == SLOTS_BYTES or (length % 7 == 0 and length <= 7 * EXACT))
    if i > #tiers then others[#others + 1] = tier end
    log_at = log_at + length
  end
  if last > now then now = last end
end

-- A tier that is neither active nor cooling down is inactive.
local function is_active(tier, at) return tier.entered > 0 and at < tier.entered + tier.active end
local function is_cooling(tier, at)
  local over = tier.entered + tier.active
  return tier.entered > 0 and at >= over and at < over + tier.cooldown
end

local function current_at(at)
  for i = #tiers, 1, -1 do
    if is_active(tiers[i], at) then return i end
  end
  return 0
end

-- Logs of times: the time of hit i, and the index of the first one in the window.
local function time_of(tier, i) return (unpack_bytes('<I7', tier.log, (i - 1) * 7 + 1)) end
local function first_counting(tier, at)
  local low, high = 1, #tier.log / 7 + 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    if time_of(tier, middle) + tier.window < at then low = middle + 1 else high = middle end
  end
  return low
end

-- Logs of slots: the number of a time's slot.
local function slot_at(tier, at) return math.floor((at - tier.entered) * SLOTS / tier.window) end

local function has_slots(tier) return #tier.log == SLOTS_BYTES end

-- The hits up to the end of a slot, modulo 2^32. If the window of the log is another one, the hits of a slot
-- count in the one that begins nearest.
local function sum_of(tier, slot)
  local window, last = unpack_bytes('<I7I7', tier.log)
  local own = slot
  if window ~= tier.window then
    if slot >= math.floor(last * window / tier.window) then
      own = last
    else
      own = math.ceil((2 * slot + 1) * tier.window / (2 * window)) - 1
    end
  end
  local index = math.min(math.max(SLOTS + own - last, 0), SLOTS)
  return (unpack_bytes('<I4', tier.log, SUMS_AT + 4 * index))
end

local function hits_at(tier, at)
  if not has_slots(tier) then return #tier.log / 7 - first_counting(tier, at) + 1 end
  local slot = slot_at(tier, at)
  return (sum_of(tier, slot) - sum_of(tier, slot - SLOTS)) % MODULUS
end

-- The sums of a log, as bytes, when `slot` is the last one.
local function sums_at(tier, slot)
  local sums = {}
  if not has_slots(tier) then
    local i, hits = 1, #tier.log / 7
    for at = slot - SLOTS, slot do
      while i <= hits and slot_at(tier, time_of(tier, i)) <= at do i = i + 1 end
      sums[#sums + 1] = pack('<I4', i - 1)
    end
    return table.concat(sums)
  end
  local window, last = unpack_bytes('<I7I7', tier.log)
  if window == tier.window then
    local by = math.min(slot - last, SLOTS + 1)
    assert(by >= 0)
    return string.sub(tier.log, SUMS_AT + 4 * by) .. string.rep(string.sub(tier.log, -4), by)
  end
  for at = slot - SLOTS, slot do sums[#sums + 1] = pack('<I4', sum_of(tier, at)) end
  return table.concat(sums)
end

local function add(tier, hits)
  if not has_slots(tier) then
    local times = string.sub(tier.log, (first_counting(tier, now) - 1) * 7 + 1)
    if #times / 7 + hits <= EXACT then
      tier.log = times .. string.rep(pack('<I7', now), hits)
      return
    end
    tier.log = times
  end
  local slot = slot_at(tier, now)
  local sums = sums_at(tier, slot)
  local newest = (unpack_bytes('<I4', sums, #sums - 3) + hits) % MODULUS
  tier.log = pack('<I7I7', tier.window, slot) .. string.sub(sums, 1, -5) .. pack('<I4', newest)
end

-- The first time from `at` on when a tier has room for so many hits if no others come; nil: never.
local function room_at(tier, at, needed)
  if needed > tier.limit then return nil end
  local expiring = hits_at(tier, at) - (tier.limit - needed)
  if expiring <= 0 then return at end
  if not has_slots(tier) then
    return time_of(tier, first_counting(tier, at) + expiring - 1) + tier.window + 1
  end
  local high = slot_at(tier, at)
  local low = high - SLOTS
  local before = sum_of(tier, low)
  while low + 1 < high do
    local middle = math.floor((low + high) / 2)
    if (sum_of(tier, middle) - before) % MODULUS >= expiring then high = middle else low = middle end
  end
  -- Slot `high` expires when SLOTS later ones begin.
  return tier.entered + math.ceil((high + SLOTS) * tier.window / SLOTS)
end

-- The indexes of the tiers above `current` that a large enough burst enters at a time, in order.
local function enterable(current, at)
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

-- When the least number of hits could be granted; nil: never.
local function retry_at()
  local changes = { now }
  for _, tier in ipairs(tiers) do
    if tier.entered > 0 then
      local over = tier.entered + tier.active
      if over > now then changes[#changes + 1] = over end
      if over + tier.cooldown > now then changes[#changes + 1] = over + tier.cooldown end
    end
  end
  table.sort(changes)
  for n, from in ipairs(changes) do
    local current, needed = current_at(from), least
    for _, i in ipairs(enterable(current, from)) do needed = needed - tiers[i].limit end
    local at
    if needed <= 0 then
      at = from
    elseif current > 0 then
      at = room_at(tiers[current], from, needed)
    end
    if at and (not changes[n + 1] or at < changes[n + 1]) then return at end
  end
end

local current = current_at(now)
-- What is granted is added up: `copies` may be too large for a difference to be exact.
local used, granted, taken = 0, 0, {}
if current > 0 then
  local tier = tiers[current]
  used = hits_at(tier, now)
  granted = math.min(copies, math.max(tier.limit - used, 0))
  taken[1] = { current, granted }
end
for _, i in ipairs(enterable(current, now)) do
  if granted >= copies then break end
  local hits = math.min(copies - granted, tiers[i].limit)
  taken[#taken + 1] = { i, hits }
  granted = granted + hits
end

if granted < least then
  local at = retry_at()
  return { 0, current, used, 0, at and at - asked_at or -1, corrupt and 1 or 0 }
end

local burst, reached, hits = 0, 0, 0
for _, take in ipairs(taken) do
  local tier = tiers[take[1]]
  if take[1] ~= current then tier.entered, tier.log, burst = now, '', 1 end
  add(tier, take[2])
  reached, hits = take[1], hits_at(tier, now)
end

local known, ends = 0, 0
for i, tier in ipairs(tiers) do
  if tier.entered > 0 then
    known, ends = i, math.max(ends, tier.entered + tier.active + tier.cooldown)
  end
end
local expires_ms = math.ceil(ends / 1000)
if #others > 0 then
  known, expires_ms = #tiers + #others, math.max(expires_ms, call('PEXPIRETIME', key))
  for _, tier in ipairs(others) do tiers[#tiers + 1] = tier end
end
local parts = { pack('<BI7', known, now) }
for i = 1, known do parts[i + 1] = pack('<I7I2', tiers[i].entered, #tiers[i].log) end
for i = 1, known do parts[known + i + 1] = tiers[i].log end
call('SET', key, table.concat(parts), 'PXAT', string.format('%.0f', expires_ms))
return { granted, reached, hits, burst, -1, corrupt and 1 or 0 }
