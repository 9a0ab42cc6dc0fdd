-- Decides one request for a lease on a resource, or takes a lease back. Mirrors
-- domain/lease.rs and domain/sharing.rs, which say what is decided and why.
--
-- Atomic, as what one holder gets depends on what all others have at that moment.
--
-- KEYS[1]  holders: a hash (see below)
-- KEYS[2]  by wants: a sorted set of the holders by wants per subclient
-- KEYS[3]  by expiry: a sorted set of the holders by when their leases expire, in seconds
-- KEYS[4]  birth: since when this store has had its state, in microseconds
-- KEYS[5]  resources: a sorted set of all resources by when their keys expire, in seconds
-- KEYS[6]  upstream: a hash that is there only in a cluster with a parent (see below)
-- ARGV[1]  11 packed doubles:
--          1 operation: 0 ask, 1 release,      7 claimed capacity
--            2 only drop what has expired      8 claimed expiry in seconds; 0: no claim
--          2 rule: 0 NO_ALGORITHM, 1 STATIC,   9 learn for so many microseconds more
--            2 PROPORTIONAL_SHARE,            10 1: the capacity is the parent's lease
--            3 FAIR_SHARE, 4 the parent's     11 the time in microseconds; 0: Redis' own
--          3 capacity
--          4 seconds from grant to expiry
--          5 seconds to learn after birth
--          6 what the holder wants, before any bound
-- ARGV[2]  the holder: a client's id, or \254 and the id of a cluster of servers; '' to drop
-- ARGV[3]  what it wants: for each priority 8 opaque bytes, a 4-byte count of subclients and
--          a double
-- ARGV[4]  the resource's name
--
-- The field '' of the holders (no id is empty) has the sums: 15 packed doubles, named where
-- they are unpacked. A holder's value: what it has (double), the expiry in seconds (4 bytes),
-- then as ARGV[3].
-- The field '' of upstream has the parent's lease, as lua/parent.lua writes it; those named by
-- a priority's 8 bytes have what is wanted with that priority: hi, lo, subclients, as doubles.
--
-- Reply to ask: 7 packed doubles: has, expiry in seconds, learning until in microseconds
-- (0: not learning), capacity, rule, seconds of the parent's refresh interval (-1: none),
-- subclients. Reply to the others: 1 if there was a lease to release, 0 if not.

local DROP_LIMIT = 1000
local CROSS_LIMIT = 256
local PAGE = 32
local SERVER = 254

local holders, by_wants, by_expiry, upstream = KEYS[1], KEYS[2], KEYS[3], KEYS[6]
local id = ARGV[2]
local op, rule, capacity, lease_s, learning_s, wanted, claimed, claim_expiry, learn_for, from_parent, now =
  struct.unpack('<ddddddddddd', ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
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

local found = redis.call('HMGET', holders, '', id)
local record = op < 2 and found[2]

-- Above and below the threshold: wants (hi, lo) and subclients; all leases (hi, lo); the
-- threshold is between low and high; holders; when the next lease may expire; when the keys
-- expire; birth; 1: wants are summed up by priority, too.
local above, above_lo, above_n = 0, 0, 0
local below, below_lo, below_n = 0, 0, 0
local has, has_lo = 0, 0
local low, high = -math.huge, math.huge
local count, due, ttl, born, banded = 0, math.huge, 0, 0, from_parent
if found[1] then
  above, above_lo, above_n, below, below_lo, below_n, has, has_lo, low, high, count, due, ttl,
    born, banded = struct.unpack('<ddddddddddddddd', found[1])
elseif op > 0 then
  return 0
else
  born = tonumber(redis.call('GET', KEYS[4]) or nil)
  if not born then
    born = now
    redis.call('SET', KEYS[4], string.format('%.0f', now))
  end
  -- A Redis that evicts keys may have left these.
  redis.call('DEL', by_wants, by_expiry)
end

local function score(number)
  if number == math.huge then return '+inf' end
  if number == -math.huge then return '-inf' end
  return string.format('%.17g', number)
end

-- What a holder's bands (from byte `at` on) add up to.
local function demand(bytes, at)
  local wants, n = 0, 0
  for offset = at + 8, #bytes, 20 do
    local m, w = struct.unpack('<I4d', bytes, offset)
    wants, n = wants + w, n + m
  end
  return wants, n
end

local bands = {}
-- Notes what becomes of the bands of a holder; sign is 1 or -1.
local function note_bands(bytes, at, sign)
  for offset = at, #bytes, 20 do
    local name = string.sub(bytes, offset, offset + 7)
    local n, w = struct.unpack('<I4d', bytes, offset + 8)
    local band = bands[name]
    if not band then
      local value = redis.call('HGET', upstream, name)
      if value then
        band = {struct.unpack('<ddd', value)}
      else
        band = {0, 0, 0}
      end
      bands[name] = band
    end
    band[1], band[2] = add(band[1], band[2], sign * w)
    band[3] = band[3] + sign * n
  end
end

local function take_away(bytes)
  local held = struct.unpack('<d', bytes)
  has, has_lo = add(has, has_lo, -held)
  local wants, n = demand(bytes, 13)
  if wants / n <= low then
    below, below_lo = add(below, below_lo, -wants)
    below_n = below_n - n
    if below_n <= 0 then below, below_lo, below_n = 0, 0, 0 end
  else
    above, above_lo = add(above, above_lo, -wants)
    above_n = above_n - n
    if above_n <= 0 then above, above_lo, above_n = 0, 0, 0 end
  end
  if banded == 1 then note_bands(bytes, 13, -1) end
  count = count - 1
  return held, wants, n
end

-- Leases that have expired.
if due <= now_s then
  local ids = redis.call('ZRANGEBYSCORE', by_expiry, '-inf', now_s, 'LIMIT', 0, DROP_LIMIT)
  if #ids > 0 then
    local values = redis.call('HMGET', holders, unpack(ids))
    for i = 1, #ids do
      take_away(values[i])
      if ids[i] == id then record = false end
    end
    redis.call('HDEL', holders, unpack(ids))
    redis.call('ZREM', by_wants, unpack(ids))
    redis.call('ZREMRANGEBYRANK', by_expiry, 0, #ids - 1)
  end
  local first = redis.call('ZRANGE', by_expiry, 0, 0, 'WITHSCORES')
  due = tonumber(first[2]) or math.huge
  -- What has become empty is made anew, without an expiry.
  if count == 0 then ttl = 0 end
end

local old_has, old_wants, old_n = 0, nil, nil
if record then
  old_has, old_wants, old_n = take_away(record)
end

-- Writes the sums, and with them further fields and values.
local function write(...)
  redis.call('HSET', holders, '', struct.pack('<ddddddddddddddd', above, above_lo, above_n, below,
    below_lo, below_n, has, has_lo, low, high, count, due, ttl, born, banded), ...)
  for name, band in pairs(bands) do
    if band[3] <= 0 then
      redis.call('HDEL', upstream, name)
    else
      redis.call('HSET', upstream, name, struct.pack('<ddd', band[1], band[2], band[3]))
    end
  end
end

if op > 0 then
  if record then
    redis.call('HDEL', holders, id)
    redis.call('ZREM', by_wants, id)
    redis.call('ZREM', by_expiry, id)
  end
  if count <= 0 then
    redis.call('DEL', holders, by_wants, by_expiry, upstream)
    redis.call('ZREM', KEYS[5], ARGV[4])
  else
    write()
  end
  return record and 1 or 0
end

-- What there is to share, and by which rule.
local parent_refresh, last_expiry = -1, math.huge
if from_parent == 1 then
  local lease = redis.call('HGET', upstream, '')
  if lease then
    local leased, expiry, refresh, safe, kind, length, frozen, frozen_until =
      struct.unpack('<dddddddd', lease)
    parent_refresh = refresh
    if rule == 4 then rule, lease_s = kind, length end
    if expiry > now_s then
      capacity, last_expiry = leased, expiry
    else
      capacity = safe
    end
    if frozen_until > now then capacity = math.min(capacity, frozen) end
  else
    capacity = 0
    if rule == 4 then rule = 3 end
  end
end
local shares = rule >= 2

-- The holder's wants, each bounded so that the sums stay finite and exact.
local most = math.min(math.max(capacity, 1) * 1073741824, 1e280)
local asked = ARGV[3]
local wants, n = demand(asked, 1)
if wants > most then
  local bounded = {}
  for offset = 1, #asked, 20 do
    local m, w = struct.unpack('<I4d', asked, offset + 8)
    bounded[#bounded + 1] = string.sub(asked, offset, offset + 7) .. struct.pack('<I4d', m, math.min(w, most))
  end
  asked = table.concat(bounded)
  wants, n = demand(asked, 1)
end

-- Split::level
local function level()
  if rule == 3 then return ((capacity - below) - below_lo) / above_n end
  return capacity / (above_n + below_n)
end

local ratio = wants / n
if old_wants ~= wants or old_n ~= n then
  redis.call('ZADD', by_wants, score(ratio), id)
end
if count == 0 then has, has_lo = 0, 0 end
count = count + 1
if banded == 1 then note_bands(asked, 1, 1) end
if ratio <= low then
  below, below_lo = add(below, below_lo, wants)
  below_n = below_n + n
else
  local before, before_lo, before_n = above, above_lo, above_n
  above, above_lo = add(above, above_lo, wants)
  above_n = above_n + n
  if ratio < high then
    -- Nobody is between: the threshold may go to either side of this one.
    if ratio <= level() then
      above, above_lo, above_n = before, before_lo, before_n
      below, below_lo = add(below, below_lo, wants)
      below_n = below_n + n
      low = ratio
    else
      high = ratio
    end
  end
end

-- Split::wants
local function all_wants()
  local all, all_lo = add(above, above_lo, below)
  return (add(all, all_lo, below_lo))
end

-- What the holders of one place in the order want, and their subclients. `members` are all
-- of them, or nil if they are too many to have been read.
local function place(text, members)
  local number = tonumber(text)
  local servers, plain
  if members then
    servers, plain = {}, 0
    for _, member in ipairs(members) do
      if string.byte(member) == SERVER then
        servers[#servers + 1] = member
      else
        plain = plain + 1
      end
    end
  else
    -- Servers sort after all clients of the same place.
    plain = redis.call('ZCOUNT', by_wants, text, text)
    servers = {}
    local offset, more = 0, true
    while more do
      local page = redis.call('ZREVRANGEBYSCORE', by_wants, text, text, 'LIMIT', offset, PAGE)
      more = #page == PAGE
      for _, member in ipairs(page) do
        if string.byte(member) ~= SERVER then
          more = false
          break
        end
        servers[#servers + 1] = member
      end
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
      w, m = demand(redis.call('HGET', holders, member), 13)
    end
    product, product_lo = add(product, product_lo, w)
    total = total + m
  end
  return product, product_lo, total
end

local function move_up(hi, lo, m)
  below, below_lo = add(below, below_lo, hi)
  below, below_lo = add(below, below_lo, lo)
  below_n = below_n + m
  above, above_lo = add(above, above_lo, -hi)
  above, above_lo = add(above, above_lo, -lo)
  above_n = above_n - m
  if above_n <= 0 then above, above_lo, above_n = 0, 0, 0 end
end

local function move_down(hi, lo, m)
  above, above_lo = add(above, above_lo, hi)
  above, above_lo = add(above, above_lo, lo)
  above_n = above_n + m
  below, below_lo = add(below, below_lo, -hi)
  below, below_lo = add(below, below_lo, -lo)
  below_n = below_n - m
  if below_n <= 0 then below, below_lo, below_n = 0, 0, 0 end
end

-- Moves the threshold past as many holders as the level is past, or as one decision may.
local function cross(up)
  local moved = 0
  while moved < CROSS_LIMIT do
    local page
    if up then
      page = redis.call('ZRANGEBYSCORE', by_wants, score(high), '+inf', 'WITHSCORES', 'LIMIT', 0, PAGE)
    else
      page = redis.call('ZREVRANGEBYSCORE', by_wants, score(low), '-inf', 'WITHSCORES', 'LIMIT', 0, PAGE)
    end
    local whole = #page < 2 * PAGE
    local at = 1
    while at <= #page do
      local text = page[at + 1]
      local number = tonumber(text)
      local target = level()
      if up then
        high = number
        if number > target then return end
      else
        low = number
        if number <= target then return end
      end
      local members = {}
      repeat
        members[#members + 1] = page[at]
        at = at + 2
      until page[at + 1] ~= text
      if at > #page and not whole then members = nil end
      if up then
        move_up(place(text, members))
        low = number
      else
        move_down(place(text, members))
        high = number
      end
      moved = moved + 1
      if at > #page and not whole then
        -- The next page begins behind this place.
        local open = '(' .. text
        local next
        if up then
          next = redis.call('ZRANGEBYSCORE', by_wants, open, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
          high = tonumber(next[2]) or math.huge
        else
          next = redis.call('ZREVRANGEBYSCORE', by_wants, open, '-inf', 'WITHSCORES', 'LIMIT', 0, 1)
          low = tonumber(next[2]) or -math.huge
        end
      end
    end
    if whole then
      if up then high = math.huge else low = -math.huge end
      return
    end
  end
end

local total = all_wants()
if shares and total > capacity then
  local target = level()
  if target >= high then
    cross(true)
  elseif target < low then
    cross(false)
  end
  total = all_wants()
end

-- learning_until
local learning = math.max(born + learning_s * 1000000, now + learn_for)
if learning_s <= 0 or now >= learning then learning = 0 end

if claim_expiry <= now_s then claimed = 0 end
local granted
if learning > 0 then
  granted = claimed
elseif rule == 0 then
  granted = wanted
else
  -- Split::entitlement
  if rule == 1 then
    granted = math.min(wants, capacity)
  elseif total <= capacity then
    granted = wants
  elseif rule == 3 then
    local share = capacity / (above_n + below_n)
    if above_n > 0 then share = math.max(share, level()) end
    granted = math.min(wants, n * share)
  else
    local equal = capacity / (above_n + below_n)
    local own = n * equal
    if wants <= own then
      granted = wants
    else
      local left = below_n * equal - below
      local excess = above - above_n * equal
      if left <= 0 or excess <= 0 then
        granted = own
      else
        granted = math.min(wants, own + left * ((wants - own) / excess))
      end
    end
  end
  if shares then
    granted = math.max(math.min(granted, (capacity - has) - has_lo), 0)
  end
end

-- A cluster keeps what it has leased out until its clients have given it back.
local kept = granted
if string.byte(id) == SERVER then kept = math.max(kept, math.min(claimed, old_has)) end
kept = math.min(kept, most)
local expiry = math.min(last_expiry, now_s + lease_s)
has, has_lo = add(has, has_lo, kept)
redis.call('ZADD', by_expiry, expiry, id)
due = math.min(due, expiry)
local fresh = expiry > ttl
if fresh then ttl = expiry + lease_s end
write(id, struct.pack('<dI4', kept, expiry) .. asked)
if fresh then
  -- The keys outlive every lease, and are told so once a lease length.
  redis.call('EXPIREAT', holders, ttl)
  redis.call('EXPIREAT', by_wants, ttl)
  redis.call('EXPIREAT', by_expiry, ttl)
  if banded == 1 then redis.call('EXPIREAT', upstream, ttl) end
  redis.call('ZADD', KEYS[5], ttl, ARGV[4])
  redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', now_s)
end
return struct.pack('<ddddddd', granted, expiry, learning, capacity, rule, parent_refresh,
  above_n + below_n)
