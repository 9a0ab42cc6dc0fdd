-- A request for hits of a domain on a resource. Mirrors server/src/domain/throttle.rs and throttle/log.rs.
-- Atomic, because the hits that are granted depend on all that were granted before. lua/guard.lua goes
-- around it.
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
-- last entered, 0 for never, and its bytes; then the logs: first that of the last second, then by tier. A
-- log has an I7 for the time of each of up to 128 hits. One with more hits is '<I7I7', the window and the
-- number of the last slot, and 129 I4: the hits up to the end of the slot before the last 128, and of each of
-- these, modulo 2^32. The key expires when it can't decide anything any more. Logs that the limits lack are
-- kept, and with them what the key had left.

local corrupt = ...
local call, pack, unpack_bytes = redis.call, struct.pack, struct.unpack
local EXACT, SLOTS, MODULUS = 128, 128, 4294967296
local HEADER_BYTES, SLOTS_BYTES, SUMS_AT = 48, 530, 15
local TIER_BYTES = 40
local SECOND, LONGEST = 1000000, 366 * 86400 * 1000000
-- How far ahead of the server's clock, in µs, a domain's last hit may be: the clock may have stepped back.
local AHEAD = 3600000000

local numbers = ARGV[1]
local now, copies, least, hard, global, known_only = unpack_bytes('<dddddd', numbers)
local simulated = now ~= 0
if not simulated then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local asked_at = now

-- The history of a key: `logs` by number, from 1 for that of the last second, and `now`, the time of the
-- request, which is not before the last hit. `tiers` are those of the limits. A history that is further
-- ahead than `ahead` counts as absent.
local function read(key, tiers, ahead)
  local value = not corrupt and call('GET', key)
  if simulated and value then
    local expires_ms = call('PEXPIRETIME', key)
    if expires_ms >= 0 and math.floor(asked_at / 1000) > expires_ms then value = false end
  end
  local history = { key = key, logs = {}, limited = #tiers, now = asked_at, is_known = false }
  for i, tier in ipairs(tiers) do
    tier.entered, tier.log = 0, ''
    history.logs[i] = tier
  end
  if not value then return history end
  local known, last = unpack_bytes('<BI7', value)
  if last > asked_at + ahead then return history end
  history.now, history.is_known = math.max(asked_at, last), true
  local log_at = 9 + known * 9
  for i = 1, known do
    local entered, length = unpack_bytes('<I7I2', value, 9 + (i - 1) * 9)
    local tier = history.logs[i] or {}
    tier.entered, tier.log = entered, string.sub(value, log_at, log_at + length - 1)
    assert(entered <= last and length == #tier.log)
    assert(length == SLOTS_BYTES or (length % 7 == 0 and length <= 7 * EXACT))
    history.logs[i] = tier
    log_at = log_at + length
  end
  return history
end

local function second(limit)
  return { limit = limit, window = SECOND, active = LONGEST, cooldown = 0 }
end

local of_domain, tiers = second(hard), {}
for i = 1, (#numbers - HEADER_BYTES) / TIER_BYTES do
  local limit, window, active, cooldown, skippable =
    unpack_bytes('<ddddd', numbers, HEADER_BYTES + (i - 1) * TIER_BYTES + 1)
  tiers[i] = { limit = limit, window = window, active = active, cooldown = cooldown,
    skippable = skippable == 1 }
end
local history = read(KEYS[1], { of_domain, unpack(tiers) }, AHEAD)
now = history.now
-- Where the clock has stepped back, all domains must not wait for it, so their time is their own.
local of_all, all_history, all_now = second(global), nil, asked_at
if global >= 0 then
  all_history = read(KEYS[2], { of_all }, SECOND)
  all_now = all_history.now
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

local function add(tier, hits, now)
  if hits_at(tier, now) == 0 then tier.log = '' end
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

-- Of a log of the last second: its hits at a time.
local function hits_in_second(log, at)
  if log.limit < 0 or not is_active(log, at) then return 0 end
  return hits_at(log, at)
end

local domain_hits, all_hits = hits_in_second(of_domain, now), hits_in_second(of_all, all_now)
local hard_room = hard < 0 and math.huge or math.max(hard - domain_hits, 0)
local global_room = global < 0 and math.huge or math.max(global - all_hits, 0)

local current = current_at(now)
-- What is granted is added up: `copies` may be too large for a difference to be exact.
local used, fitting, taken = 0, 0, {}
local function take(i, room)
  if fitting < copies then
    local hits = math.min(copies - fitting, room)
    taken[#taken + 1] = { i, hits }
    fitting = fitting + hits
  end
end
if current > 0 then
  used = hits_at(tiers[current], now)
  take(current, math.max(tiers[current].limit - used, 0))
end
for _, i in ipairs(enterable(current, now)) do take(i, tiers[i].limit) end
local granted = math.min(fitting, hard_room, global_room)
local by_hard = hard_room < fitting and hard_room == granted and 1 or 0
local by_global = global_room < fitting and global_room == granted and 1 or 0
local replaced = corrupt and 1 or 0

if granted < least then
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

  -- The first time, from `at` on, when such a log has room for the least number.
  local function second_room_at(log, at)
    if log.limit < 0 then return at end
    if is_active(log, at) then return room_at(log, at, least) end
    if least <= log.limit then return at end
  end

  -- When the tiers could take the least number of hits, from `start` on; nil: never.
  local function retry_at(start)
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

  local domain_at, all_at = second_room_at(of_domain, now), second_room_at(of_all, all_now)
  local at = domain_at and all_at and retry_at(math.max(domain_at, all_at))
  local after = at and at - asked_at or -1
  return { 0, current, used, 0, after, replaced, domain_hits, all_hits, by_hard, by_global, 0 }
end
if known_only == 1 and not history.is_known then
  return { 0, 0, 0, 0, -1, replaced, domain_hits, all_hits, 0, 0, 1 }
end

-- Adds hits to the log of a tier. Enters it if it is not active. Returns whether it does.
local function enter_and_add(tier, hits, at)
  local enters = not is_active(tier, at)
  if enters then tier.entered, tier.log = at, '' end
  add(tier, hits, at)
  return enters
end

local burst, reached, hits, left = 0, 0, 0, granted
for _, one in ipairs(taken) do
  local tier, part = tiers[one[1]], math.min(one[2], left)
  if part > 0 then
    left = left - part
    if enter_and_add(tier, part, now) then burst = 1 end
    reached, hits = one[1], hits_at(tier, now)
  end
end
if hard >= 0 then
  enter_and_add(of_domain, granted, now)
  domain_hits = domain_hits + granted
end
if global >= 0 then
  enter_and_add(of_all, granted, all_now)
  all_hits = all_hits + granted
end

local function write(history)
  local logs, ends, known = history.logs, 0, 0
  for i, tier in ipairs(logs) do
    if tier.entered > 0 then
      known = i
      if i == 1 then
        ends = math.max(ends, history.now + SECOND)
      elseif i <= history.limited then
        ends = math.max(ends, tier.entered + tier.active + tier.cooldown)
      end
    end
  end
  local expires_ms = math.ceil(ends / 1000)
  if #logs > history.limited then
    expires_ms = math.max(expires_ms, call('PEXPIRETIME', history.key))
  end
  local parts = { pack('<BI7', known, history.now) }
  for i = 1, known do parts[i + 1] = pack('<I7I2', logs[i].entered, #logs[i].log) end
  for i = 1, known do parts[known + i + 1] = logs[i].log end
  call('SET', history.key, table.concat(parts), 'PXAT', expires_ms)
end

write(history)
if global >= 0 then write(all_history) end
return { granted, reached, hits, burst, -1, replaced, domain_hits, all_hits, by_hard, by_global, 0 }
