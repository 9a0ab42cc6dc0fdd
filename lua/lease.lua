-- Decides one request for a lease on a resource, releases a lease, or only drops expired leases.
-- Mirrors domain/lease.rs and domain/sharing.rs, which explain the decision.
--
-- Atomic, because the share of one holder depends on what all others have at that moment.
--
-- KEYS[1]  holders: a hash (see below)
-- KEYS[2]  by wants: a sorted set of the holders by wants per subclient
-- KEYS[3]  by expiry: a sorted set of the holders by the expiry of their leases, in s
-- KEYS[4]  upstream: a hash, only in a cluster with a parent (see below)
--          Keys that are not declared are in ARGV: while Redis Cluster moves a slot, it refuses a
--          call that declares several keys of which one does not exist. So the new owner of the
--          slot, which is asked once the old one has none of the keys, gets only the first one
--          declared; and the fourth is declared only if there is a parent.
-- ARGV[1]  14 packed doubles:
--            1 operation: 0 ask, 1 release, 2 only drop expired leases
--            2 rule: 0 NO_ALGORITHM, 1 STATIC, 2 PROPORTIONAL_SHARE, 3 FAIR_SHARE, 4 the parent's
--            3 capacity
--            4 length of a lease, in s
--            5 length of learning mode after the birth, in s; 0: none
--            6 what the holder wants in total, before any bound
--            7 claimed capacity; inf: all that it was leased (Claim::UNKNOWN)
--            8 expiry of the claim, in s; 0: no claim
--            9 minimum remaining time of learning mode, in µs
--           10 1: the parent's lease determines the capacity
--           11 the time in µs, for tests; 0: the server's own
--           12 the birth under the server's former key, if ARGV[5] is a new key; else 0
--           13 the last known birth; 0: unknown
--           14 1: do not create the resource
-- ARGV[2]  the holder: a client's id, or \254 and the id of a lower cluster; '' to drop
-- ARGV[3]  its wants: for each priority 8 opaque bytes, the number of subclients (4 bytes) and the
--          wants (a double)
-- ARGV[4]  the resource's name
-- ARGV[5]  the key of the birth: since when this store has had its state, in µs
-- ARGV[6]  the key of the register of resources: a sorted set by the expiry of their keys, in s
-- ARGV[7…] keys that are not declared
-- ARGV[#]  the most bands of expired leases that the call may drop. Also scales the other bounds on
--          maintenance work, which the calls of one round trip share. See WorkLimits::shared_by.
-- ARGV[5] and ARGV[6] belong to the Redis server, not to the resource, and have another hash tag: so
-- they are not in KEYS. While their slot is being moved, the last known birth counts, and a later call
-- registers the resource. If they are '', the server has no slot yet.
--
-- Holders: the field '' (no id is empty) has the sums: 16 packed doubles, named where they are
-- unpacked. The value of a holder: what it has (a double), the expiry in s (4 bytes), then its wants
-- as in ARGV[3].
-- Upstream: the field '' has the parent's lease, as lua/parent.lua writes it. The fields named by the
-- 8 bytes of a priority have the wants with that priority: hi, lo, subclients, as doubles. The field
-- 'n' has the number of the last freeze.
--
-- Reply to ask: 7 packed doubles: has, expiry in s, end of learning mode in µs (0: not learning),
-- capacity, algorithm, the parent's refresh interval in s (-1: no parent), subclients. An eighth
-- follows unless it is 0: the sum of 1 (the record of the resource was corrupt or partly evicted, and
-- replaced), 2 (the register of resources was corrupt), 4 (the birth was corrupt) and 8 (the resource
-- is new). The reply is '' if the resource does not exist and must not be created. Reply to release:
-- 1 if the holder had a lease, else 0. Reply to drop: 0.
--
-- A corrupt record is dropped as a whole by the next request for a lease: it is unknown then what is
-- leased, so the resource learns it from its clients, as after the birth of the store. Release and
-- drop only mark the record as corrupt.

-- Bands of expired leases to drop; nearly all leases have one band.
local DROP_LIMIT = tonumber(ARGV[#ARGV])
local DROP_PAGE = 100
local SWEEP_LIMIT = math.min(300, DROP_LIMIT)
-- Groups of holders with equal wants to move across the threshold, and lower clusters to read for it.
local CROSS_LIMIT = math.max(32, math.ceil(DROP_LIMIT * 256 / 1000))
-- This many bytes of a lower cluster's wants count as one more group.
local CROSS_BYTES = 240
local PAGE = 32
local REGISTER_LIMIT = math.min(100, DROP_LIMIT)
local SERVER = 254
-- A stored time further from now than this, in s, is corrupt: the longest lease is four years.
local FAR = 1000000000
-- A past time further in the future than this, in µs, is corrupt: clocks step back by less.
local AHEAD = 3600000000
-- More than the number of holders that any resource has.
local MANY = 10000000000
-- The error about a corrupt record; see lua/guard.lua.
local CORRUPT = 'what is stored about this resource makes no sense'

-- Nearly all holders are plain clients with one priority, so their code is inline. To create a
-- function that uses locals around it costs as much as a command: see allow.lua.

local again = ...
local call, min, max = redis.call, math.min, math.max
local pack, unpacked = struct.pack, struct.unpack
local holders, by_wants, by_expiry = KEYS[1], KEYS[2] or ARGV[7], KEYS[3] or ARGV[8]
local upstream = KEYS[4] or ARGV[#ARGV - 1]
local id = ARGV[2]
local op, rule, capacity, lease_s, learning_s, wanted, claimed, claim_expiry, learn_for, from_parent, now,
  inherited, last_known, existing_only = unpacked('<dddddddddddddd', ARGV[1])
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local now_s = math.floor(now / 1000000)

-- Sum::add
local function add(hi, lo, x)
  local sum = hi + x
  local part = sum - hi
  local err = (hi - (sum - part)) + (x - part) + lo
  local high = sum + err
  return high, err - (high - sum)
end

-- Removes keys one by one: a command with several keys is refused while their slot is being moved.
local function forget_all()
  call('UNLINK', holders)
  call('UNLINK', by_wants)
  call('UNLINK', by_expiry)
  redis.pcall('UNLINK', upstream)
end

-- The eighth number of the reply; nil if it is left out.
local findings
if again then
  if op > 0 then
    -- Marks the record as corrupt: '' can't be unpacked.
    redis.pcall('HSET', holders, '', '')
    return 0
  end
  local all = rule + capacity + lease_s + learning_s + wanted + claim_expiry + learn_for
    + inherited + last_known
  for offset = 9, #ARGV[3], 20 do
    local _, w = unpacked('<I4d', ARGV[3], offset)
    all = all + w
  end
  if all - all ~= 0 or claimed ~= claimed or #ARGV[3] < 20 then
    return { err = 'ERR these are no arguments of this script' }
  end
  forget_all()
  findings = 1
end

local found = call('HMGET', holders, '', id)
local record = op < 2 and found[2]

-- Above and below the threshold: wants (hi, lo) and subclients; all leases (hi, lo); the
-- threshold is between low and high; holders; when the next lease may expire; when the keys
-- expire; birth; 1: wants are summed up by priority, too; the number of ghosts (see below).
local above, above_lo, above_n = 0, 0, 0
local below, below_lo, below_n = 0, 0, 0
local has, has_lo = 0, 0
local low, high = -math.huge, math.huge
local count, due, keys_until, born, banded, ghosts = 0, math.huge, 0, 0, from_parent, 0
-- Rounding makes the sum of all leases at most this negative. The sums of wants have no such bound:
-- they go wrong if Redis evicts the order by wants. The leases are known even then.
local least = -0.001 * max(capacity, 1)
if found[1] then
  above, above_lo, above_n, below, below_lo, below_n, has, has_lo, low, high, count, due, keys_until,
    born, banded, ghosts = unpacked('<dddddddddddddddd', found[1])
  -- Comparisons with NaN are false, and infinity minus infinity is NaN.
  local all = above + above_lo + below + below_lo + has_lo
  if not (all - all == 0 and has >= least and has < math.huge and low <= high and above_n >= 0
    and below_n >= 0 and count >= 0 and ghosts >= 0 and count + ghosts <= MANY
    and (above_n + below_n + count + ghosts) % 1 == 0 and keys_until >= 0
    and keys_until <= now_s + FAR
    and (due <= now_s + FAR or due == math.huge) and born >= 0 and born <= now + AHEAD) then
    error(CORRUPT, 0)
  end
  -- If the order by expiry lacks holders, Redis has evicted it, and the leases of silent holders would
  -- never expire: the record is corrupt. Checked only when a lease may have expired, to save a
  -- command.
  if (due <= now_s or ghosts > 0 or op == 0 and due == math.huge)
    and call('ZCARD', by_expiry) ~= count + ghosts then
    error(CORRUPT, 0)
  end
elseif op > 0 then
  return 0
elseif existing_only == 1 and not again then
  return ''
else
  if not again then findings = 8 end
  local known = ARGV[5] ~= '' and redis.pcall('GET', ARGV[5])
  if ARGV[5] == '' or type(known) == 'table' then
    born = last_known > 0 and last_known or now
  else
    local number = known and string.find(known, '^%d+$') and tonumber(known) or 0
    if number > 0 and number <= now + AHEAD then
      born = max(number, inherited)
    else
      born = inherited > 0 and inherited or now
      call('SET', ARGV[5], string.format('%.0f', born))
      if known then findings = (findings or 0) + 4 end
    end
  end
  -- Clients may still hold the leases of the dropped record, however old the store is.
  if again then born = now end
  -- Redis may have evicted the record and kept these.
  call('UNLINK', by_wants)
  call('UNLINK', by_expiry)
end

-- The sums of a holder's bands, from byte `at` on.
local function demand(bytes, at)
  local wants, n = 0, 0
  for offset = at + 8, #bytes, 20 do
    local m, w = struct.unpack('<I4d', bytes, offset)
    wants, n = wants + w, n + m
  end
  return wants, n
end

local note_bands, write_bands
if banded == 1 then
  local bands, unseen = {}, false
  -- Adds (sign 1) or subtracts (-1) a holder's bands.
  function note_bands(bytes, at, sign)
    for offset = at, #bytes, 20 do
      local name = string.sub(bytes, offset, offset + 7)
      local n, w = unpacked('<I4d', bytes, offset + 8)
      local band = bands[name]
      if not band then
        local value = call('HGET', upstream, name)
        if value then
          band = {unpacked('<ddd', value)}
          local all = band[1] + band[2] + band[3]
          if all - all ~= 0 then error(CORRUPT, 0) end
        else
          band, unseen = {0, 0, 0}, true
        end
        bands[name] = band
      end
      band[1], band[2] = add(band[1], band[2], sign * w)
      band[3] = band[3] + sign * n
    end
  end
  function write_bands()
    -- Before any is deleted: a hash that becomes empty loses its expiry.
    for name, band in pairs(bands) do
      if band[3] > 0 then
        call('HSET', upstream, name, pack('<ddd', band[1], band[2], band[3]))
      end
    end
    for name, band in pairs(bands) do
      if band[3] <= 0 then call('HDEL', upstream, name) end
    end
    -- HSET may have created the hash, which then has no expiry: it was new, or evicted.
    if unseen then call('EXPIREAT', upstream, keys_until) end
  end
end

-- Subtracts expired leases from the sums, and the holder's own lease until it is added again. To
-- delete them from the sorted sets takes longer, so that may lag behind: the first `ghosts` entries by
-- expiry are subtracted, but not yet deleted.
local gone = {}
if due <= now_s or ghosts > 0 then
  local dropped = call('ZCOUNT', by_expiry, '-inf', now_s) - ghosts
  dropped = min(max(dropped, 0), DROP_LIMIT)
  local ids, swept = nil, 0
  if dropped > 0 then
    ids = call('ZRANGE', by_expiry, ghosts, ghosts + dropped - 1)
    local bands, at = 0, 0
    while bands < DROP_LIMIT and at < dropped do
      local page = call('HMGET', holders, unpack(ids, at + 1, min(at + DROP_PAGE, dropped)))
      for i = 1, #page do
        local bytes = page[i]
        at = at + 1
        gone[at] = bytes
        bands = bands + (#bytes - 12) / 20
        if bands >= DROP_LIMIT then break end
      end
    end
    for i = at + 1, dropped do ids[i] = nil end
    dropped = at
    ghosts = ghosts + dropped
  end
  local rank = record and call('ZRANK', by_expiry, id)
  if rank and rank < ghosts then record = false else rank = nil end
  -- Deletes ghosts only in calls that have dropped few leases.
  if ghosts > 0 and dropped <= SWEEP_LIMIT then
    if dropped < ghosts then
      ids = call('ZRANGE', by_expiry, 0, min(ghosts, SWEEP_LIMIT) - 1)
    end
    swept = #ids
    call('HDEL', holders, unpack(ids))
    call('ZREM', by_wants, unpack(ids))
    call('ZREMRANGEBYRANK', by_expiry, 0, swept - 1)
    ghosts = ghosts - swept
  end
  if rank and rank >= swept and op == 0 then
    call('ZREM', by_expiry, id)
    ghosts = ghosts - 1
  end
  if ghosts > 0 then
    due = max(due, now_s)
  else
    local first = call('ZRANGE', by_expiry, 0, 0, 'WITHSCORES')
    due = tonumber(first[2]) or math.huge
  end
end
local expired = #gone
if record then gone[expired + 1] = record end

local old_has, old_expiry, old_wants, old_n = 0, nil, nil, nil
for i = 1, #gone do
  local bytes = gone[i]
  local held, expiry, _, n, wants = unpacked('<dI4dI4d', bytes)
  if #bytes > 32 then wants, n = demand(bytes, 13) end
  if not (held >= 0 and wants >= 0 and n > 0) then error(CORRUPT, 0) end
  -- Sum::add, inlined: this loop runs for every lease that is dropped.
  local sum = has - held
  local part = sum - has
  local err = (has - (sum - part)) + (-held - part) + has_lo
  has = sum + err
  has_lo = err - (has - sum)
  if wants / n <= low then
    sum = below - wants
    part = sum - below
    err = (below - (sum - part)) + (-wants - part) + below_lo
    below = sum + err
    below_lo, below_n = err - (below - sum), below_n - n
    if below_n <= 0 then below, below_lo, below_n = 0, 0, 0 end
  else
    sum = above - wants
    part = sum - above
    err = (above - (sum - part)) + (-wants - part) + above_lo
    above = sum + err
    above_lo, above_n = err - (above - sum), above_n - n
    if above_n <= 0 then above, above_lo, above_n = 0, 0, 0 end
  end
  if note_bands then note_bands(bytes, 13, -1) end
  if i > expired then old_has, old_expiry, old_wants, old_n = held, expiry, wants, n end
end
count = count - #gone
-- Fewer than no leases are left: the record is corrupt.
if not (count >= 0 and has >= least) then error(CORRUPT, 0) end
if count == 0 then
  -- No other lease is left, so the exact sum is 0.
  has, has_lo = 0, 0
  if ghosts > 0 or found[1] and not record then
    above, above_lo, above_n, below, below_lo, below_n = 0, 0, 0, 0, 0, 0
    call('UNLINK', holders)
    call('UNLINK', by_wants)
    call('UNLINK', by_expiry)
    ghosts, due, old_expiry, old_wants = 0, math.huge, nil, nil
  end
  -- Redis has deleted the empty keys: new ones have no expiry yet.
  if not old_wants then keys_until = 0 end
end

if op > 0 then
  if count <= 0 then
    -- At once: a server that gives away the slot refuses commands on a key that has become empty.
    forget_all()
    redis.pcall('ZREM', ARGV[6], ARGV[4])
  else
    if record then
      call('HDEL', holders, id)
      call('ZREM', by_wants, id)
      call('ZREM', by_expiry, id)
    end
    call('HSET', holders, '', pack('<dddddddddddddddd', above, above_lo, above_n, below, below_lo,
      below_n, has, has_lo, low, high, count, due, keys_until, born, banded, ghosts))
    if write_bands then write_bands() end
  end
  return record and 1 or 0
end

-- Resource::effective_rules
local parent_refresh, last_expiry, most_held = -1, math.huge, capacity
if from_parent == 1 then
  local lease = call('HGET', upstream, '')
  if lease then
    local leased, expiry, refresh, safe, kind, length, frozen, frozen_until =
      unpacked('<dddddddd', lease)
    local all = leased + expiry + refresh + safe + length + frozen
    if not (all - all == 0 and leased >= 0 and safe >= 0 and kind >= 0 and kind <= 3
      and length >= 1 and length <= FAR and expiry <= now_s + FAR and frozen >= 0
      and refresh >= 0 and refresh <= FAR and frozen_until <= now + AHEAD) then
      error(CORRUPT, 0)
    end
    parent_refresh = refresh
    if rule == 4 then rule, lease_s, learning_s = kind, length, min(learning_s, length) end
    if expiry > now_s then
      capacity, last_expiry = leased, expiry
    else
      capacity = safe
    end
    most_held = capacity
    if frozen_until > now then capacity = min(capacity, frozen) end
  else
    capacity, most_held = 0, math.huge
    if rule == 4 then rule = 3 end
  end
end
-- SharingAlgorithm::most_held
if rule == 0 then most_held = math.huge end
local shares = rule >= 2

-- The holder's wants, each bounded so that the sums stay finite and exact.
local most = min(max(capacity, 1) * 1073741824, 1e280)
local asked = ARGV[3]
local _, n, wants = unpacked('<dI4d', asked)
if #asked > 20 then wants, n = demand(asked, 1) end
if wants > most then
  local bounded = {}
  for offset = 1, #asked, 20 do
    local m, w = unpacked('<I4d', asked, offset + 8)
    bounded[#bounded + 1] = string.sub(asked, offset, offset + 7) .. pack('<I4d', m, min(w, most))
  end
  asked = table.concat(bounded)
  wants, n = demand(asked, 1)
end

-- Split::level
local function level(below, below_lo, above_n, all_n)
  if rule == 3 then return ((capacity - below) - below_lo) / above_n end
  return capacity / all_n
end

local ratio = wants / n
if old_wants ~= wants or old_n ~= n then call('ZADD', by_wants, ratio, id) end
count = count + 1
if note_bands then note_bands(asked, 1, 1) end
local all_n = above_n + below_n + n
-- No holder is between low and high, so the threshold may be on either side of this holder.
if ratio > low and ratio < high then
  if above_n > 0 and ratio <= level(below, below_lo, above_n + n, all_n) then
    low = ratio
  else
    high = ratio
  end
end
if ratio <= low then
  below, below_lo = add(below, below_lo, wants)
  below_n = below_n + n
else
  above, above_lo = add(above, above_lo, wants)
  above_n = above_n + n
end

-- Split::wants
local total = 0
if shares then
  local total_lo
  total, total_lo = add(above, above_lo, below)
  total = add(total, total_lo, below_lo)
end
-- Not while there are ghosts, as the order by wants still has them. With a wrong threshold, grants
-- are smaller than the exact share, never larger.
if total > capacity and ghosts == 0 then
  local target = level(below, below_lo, above_n, all_n)
  if target >= high or target < low then
    -- Moves the threshold to the level, past at most CROSS_LIMIT groups.
    local function cross(up)
      local moved, size = 0, 2
      -- The wants and subclients of one group: the holders with equal wants per subclient.
      -- `members` is nil if they have not all been read. Returns nil if reading them exceeds
      -- CROSS_LIMIT: the next decision begins with this group. A group that exceeds it alone is
      -- not moved, so that grants are smaller than the exact share, never larger.
      local function place(text, number, members)
        local servers, plain = {}, 0
        if members then
          for _, member in ipairs(members) do
            if string.byte(member) == SERVER then
              servers[#servers + 1] = member
            else
              plain = plain + 1
            end
          end
        else
          -- Lower clusters sort after all clients of the same group.
          plain = call('ZCOUNT', by_wants, text, text)
          local offset, more = 0, true
          while more do
            local page = call('ZREVRANGEBYSCORE', by_wants, text, text, 'LIMIT', offset, PAGE)
            more = #page == PAGE
            for _, member in ipairs(page) do
              if string.byte(member) ~= SERVER then
                more = false
                break
              end
              servers[#servers + 1] = member
            end
            if moved + #servers > CROSS_LIMIT then return end
            offset = offset + PAGE
          end
          plain = plain - #servers
        end
        -- Veltkamp and Dekker: the exact product of the count and the number, in two doubles.
        local product = plain * number
        local split = 134217729 * number
        local top = split - (split - number)
        local product_lo = (plain * top - product) + plain * (number - top)
        local total = plain
        for _, member in ipairs(servers) do
          local w, m
          if member == id then
            w, m = wants, n
          else
            local bytes = call('HGET', holders, member)
            moved = moved + 1 + (#bytes - 32) / CROSS_BYTES
            if moved > CROSS_LIMIT then return end
            w, m = demand(bytes, 13)
          end
          product, product_lo = add(product, product_lo, w)
          total = total + m
        end
        return product, product_lo, total
      end

      while moved < CROSS_LIMIT do
        local page
        if up then
          page = call('ZRANGEBYSCORE', by_wants, high, '+inf', 'WITHSCORES', 'LIMIT', 0, size)
        else
          page = call('ZREVRANGEBYSCORE', by_wants, low, '-inf', 'WITHSCORES', 'LIMIT', 0, size)
        end
        local whole = #page < 2 * size
        local at = 1
        while at <= #page do
          local text = page[at + 1]
          local number = tonumber(text)
          local target = level(below, below_lo, above_n, all_n)
          if up then
            high = number
            if number > target then return end
          else
            low = number
            if number <= target then return end
          end
          local first = at
          repeat at = at + 2 until page[at + 1] ~= text
          local hi, lo, m = number, 0, 1
          if at > #page and not whole then
            hi, lo, m = place(text, number, nil)
          elseif at > first + 2 or string.byte(page[first]) == SERVER then
            local members = {}
            for i = first, at - 2, 2 do members[#members + 1] = page[i] end
            hi, lo, m = place(text, number, members)
          end
          if not hi then return end
          -- The last group stays above: the total wants exceed the capacity, so some group must,
          -- whatever rounding does to the level.
          if up and m >= above_n then return end
          if not up then hi, lo, m = -hi, -lo, -m end
          below, below_lo = add(below, below_lo, hi)
          above, above_lo = add(above, above_lo, -hi)
          if lo ~= 0 then
            below, below_lo = add(below, below_lo, lo)
            above, above_lo = add(above, above_lo, -lo)
          end
          below_n, above_n = below_n + m, above_n - m
          if below_n <= 0 then below, below_lo, below_n = 0, 0, 0 end
          if above_n <= 0 then above, above_lo, above_n = 0, 0, 0 end
          if up then low = number else high = number end
          moved = moved + 1
          if at > #page and not whole then
            local open = '(' .. text
            local next
            if up then
              next = call('ZRANGEBYSCORE', by_wants, open, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
              high = tonumber(next[2]) or math.huge
            else
              next = call('ZREVRANGEBYSCORE', by_wants, open, '-inf', 'WITHSCORES', 'LIMIT', 0, 1)
              low = tonumber(next[2]) or -math.huge
            end
          end
        end
        if whole then
          if up then high = math.huge else low = -math.huge end
          return
        end
        size = min(PAGE, CROSS_LIMIT - moved)
      end
    end
    cross(target >= high)
  end
end

-- learning_until
local learning = max(born + learning_s * 1000000, now + learn_for)
if learning_s <= 0 or now >= learning then learning = 0 end

if claim_expiry <= now_s then claimed = 0 end
-- Claim::UNKNOWN
if claimed == math.huge then claimed = old_has end
local granted
if learning > 0 then
  granted = min(claimed, most_held)
elseif rule == 0 then
  granted = wanted
elseif rule == 1 then
  granted = min(wants, capacity)
else
  -- Split::entitlement
  if total <= capacity then
    granted = wants
  elseif rule == 3 then
    local share = capacity / all_n
    if above_n > 0 then share = max(share, level(below, below_lo, above_n)) end
    granted = min(wants, n * share)
  else
    local equal = capacity / all_n
    local own = n * equal
    if wants <= own then
      granted = wants
    else
      local left = below_n * equal - below
      local excess = above - above_n * equal
      if left <= 0 or excess <= 0 then
        granted = own
      else
        granted = min(wants, own + left * ((wants - own) / excess))
      end
    end
  end
  granted = max(min(granted, (capacity - has) - has_lo), 0)
end

-- Any NaN or infinity in the values read has reached these sums.
local all = above + below + has + granted
if all - all ~= 0 then error(CORRUPT, 0) end

-- A lower cluster keeps what it has leased to its own clients until they return it.
local kept = granted
if string.byte(id) == SERVER then kept = max(kept, min(claimed, old_has)) end
kept = min(kept, most)
local expiry = min(last_expiry, now_s + lease_s)
-- Until the parent has leased anything, a learned lease expires no later than claimed.
if from_parent == 1 and parent_refresh < 0 and learning > 0 and granted > 0 then
  expiry = min(expiry, claim_expiry)
end
has, has_lo = add(has, has_lo, kept)
if ghosts > 0 then
  -- Must sort after all ghosts, even if the clock has stepped back.
  call('ZADD', by_expiry, max(expiry, due + 1), id)
else
  if old_expiry ~= expiry then call('ZADD', by_expiry, expiry, id) end
  due = min(due, expiry)
end
-- The keys must outlive all leases. They expire a lease length later than needed, so that EXPIREAT
-- and the entry in the register of resources are written only about once per lease length.
local fresh, listed = expiry > keys_until, false
local last = expiry + lease_s
if fresh then
  if ARGV[6] ~= '' then
    local added = redis.pcall('ZADD', ARGV[6], last, ARGV[4])
    if type(added) == 'table' and string.find(added.err, '^WRONGTYPE ') then
      call('DEL', ARGV[6])
      added = call('ZADD', ARGV[6], last, ARGV[4])
      findings = (findings or 0) + 2
    end
    listed = type(added) == 'number'
  end
  keys_until = listed and last or expiry
end
call('HSET', holders, id, pack('<dI4', kept, expiry) .. asked,
  '', pack('<dddddddddddddddd', above, above_lo, above_n, below, below_lo,
    below_n, has, has_lo, low, high, count, due, keys_until, born, banded, ghosts))
if write_bands then write_bands() end
if fresh then
  call('EXPIREAT', holders, last)
  call('EXPIREAT', by_wants, last)
  call('EXPIREAT', by_expiry, last)
  -- A resource from before there was a parent is not banded, but has the parent's lease.
  if banded == 1 or from_parent == 1 then call('EXPIREAT', upstream, last) end
end
if listed then
  local past = call('ZRANGEBYSCORE', ARGV[6], '-inf', now_s, 'LIMIT', 0, REGISTER_LIMIT)
  if #past > 0 then call('ZREM', ARGV[6], unpack(past)) end
end
local reply = pack('<ddddddd', granted, expiry, learning, capacity, rule, parent_refresh, all_n)
return findings and reply .. pack('<d', findings) or reply
