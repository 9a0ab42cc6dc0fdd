-- Decides one request for a lease on a resource, or takes a lease back. Mirrors
-- domain/lease.rs and domain/sharing.rs, which say what is decided and why.
--
-- Atomic, as what one holder gets depends on what all others have at that moment.
--
-- KEYS[1]  holders: a hash (see below)
-- KEYS[2]  by wants: a sorted set of the holders by wants per subclient
-- KEYS[3]  by expiry: a sorted set of the holders by when their leases expire, in seconds
-- KEYS[4]  upstream: a hash that is there only in a cluster with a parent (see below)
--          Where fewer are declared, the others are in ARGV: while Redis Cluster moves a
--          slot, it refuses a call that declares several keys of which one is not there. Only the
--          first is declared to the server that a slot goes to, which is asked when the old one has
--          none of them any more; and the fourth only where there is a parent.
-- ARGV[1]  14 packed doubles:
--          1 operation: 0 ask, 1 release,      7 claimed capacity; inf: all it was leased
--            2 only drop what has expired      8 claimed expiry in seconds; 0: no claim
--          2 rule: 0 NO_ALGORITHM, 1 STATIC,   9 learn for so many microseconds more
--            2 PROPORTIONAL_SHARE,            10 1: the capacity is the parent's lease
--            3 FAIR_SHARE, 4 the parent's     11 the time in microseconds; 0: Redis' own
--          3 capacity
--          4 seconds from grant to expiry   12 the birth, if ARGV[5] is new only because the server
--          5 seconds to learn after birth      has given away the slot of the one before; or 0
--          6 what the holder wants, before  13 the birth, as last known; or 0
--            any bound                      14 1: a resource that is not there is not made
-- ARGV[2]  the holder: a client's id, or \254 and the id of a cluster of servers; '' to drop
-- ARGV[3]  what it wants: for each priority 8 opaque bytes, a 4-byte count of subclients and
--          a double
-- ARGV[4]  the resource's name
-- ARGV[5]  the key that has the birth: since when this store has had its state, in microseconds
-- ARGV[6]  the key that has the resources: a sorted set of all by when their keys expire, in
--          seconds
-- ARGV[7…] keys that are not declared
-- ARGV[#]  how many expired leases the call may drop. It bounds all work that is done for others,
--          so that the calls of one round trip take no longer together than one alone.
-- ARGV[5] and ARGV[6] belong to the server and not to the resource, so that they share no hash tag with
-- it, and are no KEYS. Their slot may be under way to another server, with them: then the birth is
-- what was last known, and the resource is put among the others at the next opportunity. Where they
-- are '', the server has no slot yet.
--
-- The field '' of the holders (no id is empty) has the sums: 16 packed doubles, named where
-- they are unpacked. A holder's value: what it has (double), the expiry in seconds (4 bytes),
-- then as ARGV[3].
-- The field '' of upstream has the parent's lease, as lua/parent.lua writes it; those named by
-- a priority's 8 bytes have what is wanted with that priority: hi, lo, subclients, as doubles.
--
-- Reply to ask: 7 packed doubles: has, expiry in seconds, learning until in microseconds
-- (0: not learning), capacity, rule, seconds of the parent's refresh interval (-1: none),
-- subclients; and an eighth, only where something was replaced that no node can have written, or
-- was left of what has been evicted, or the resource was made: 1 the record of the resource, 2 the
-- register of resources, 4 the birth, 8 the resource was made, or their sum. The reply is '' where
-- the resource is not there and is not to be made. Reply to the others: 1 if there was a lease to release, 0 if not.
--
-- A record whose parts make no sense, each or together, is dropped as a whole by the next who asks:
-- nobody knows any more what is leased, so the resource learns it from its clients, as if the store
-- had been born at that moment. Who does anything else leaves it to that one.

-- Of bands; nearly all leases have one. WorkLimits::shared_by
local DROP_LIMIT = tonumber(ARGV[#ARGV])
local DROP_PAGE = 100
local SWEEP_LIMIT = math.min(300, DROP_LIMIT)
-- Of places in the order by wants, and of what has to be read of servers to pass them.
local CROSS_LIMIT = math.max(32, math.ceil(DROP_LIMIT * 256 / 1000))
-- So many bytes of a server's wants count as much as a place.
local CROSS_BYTES = 240
local PAGE = 32
local REGISTER_LIMIT = math.min(100, DROP_LIMIT)
local SERVER = 254
-- No time that is stored is further away, in seconds: the longest lease is four years.
local FAR = 1000000000
-- No clock that steps back makes the past seem to come by more than this, in µs: an hour.
local AHEAD = 3600000000
-- No resource has as many holders.
local MANY = 10000000000
-- What no node can have written; see lua/guard.lua.
local STRANGE = 'what is stored about this resource makes no sense'

-- Nearly all holders are plain clients, with one priority each. What they need is written
-- out here; what only others need is in functions, made where they are needed.

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

-- Removes keys one by one: a command with several is refused while they are on their way.
local function forget_all()
  call('UNLINK', holders)
  call('UNLINK', by_wants)
  call('UNLINK', by_expiry)
  redis.pcall('UNLINK', upstream)
end

-- What was replaced; nil: nothing.
local strange
if again then
  if op > 0 then
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
  strange = 1
end

local found = call('HMGET', holders, '', id)
local record = op < 2 and found[2]

-- Above and below the threshold: wants (hi, lo) and subclients; all leases (hi, lo); the
-- threshold is between low and high; holders; when the next lease may expire; when the keys
-- expire; birth; 1: wants are summed up by priority, too; how many count no more (see below).
local above, above_lo, above_n = 0, 0, 0
local below, below_lo, below_n = 0, 0, 0
local has, has_lo = 0, 0
local low, high = -math.huge, math.huge
local count, due, ttl, born, banded, ghosts = 0, math.huge, 0, 0, from_parent, 0
-- A sum of leases that all have gone may be off by this much, and no more. Those of wants may: a
-- Redis that evicts keys may have taken the order by wants, and what is leased is known anyway.
local least = -0.001 * max(capacity, 1)
if found[1] then
  above, above_lo, above_n, below, below_lo, below_n, has, has_lo, low, high, count, due, ttl,
    born, banded, ghosts = unpacked('<dddddddddddddddd', found[1])
  -- NaN is neither less nor more than anything, and infinity less itself is NaN.
  local all = above + above_lo + below + below_lo + has_lo
  if not (all - all == 0 and has >= least and has < math.huge and low <= high and above_n >= 0
    and below_n >= 0 and count >= 0 and ghosts >= 0 and count + ghosts <= MANY
    and (above_n + below_n + count + ghosts) % 1 == 0 and ttl >= 0 and ttl <= now_s + FAR
    and (due <= now_s + FAR or due == math.huge) and born >= 0 and born <= now + AHEAD) then
    error(STRANGE, 0)
  end
  -- Where the order by expiry is not of all holders, a Redis that evicts keys has taken it, and
  -- those who were in it and ask no more would never expire. What is left is worth nothing then.
  -- It is asked seldom, when a lease may have expired.
  if (due <= now_s or ghosts > 0 or op == 0 and due == math.huge)
    and call('ZCARD', by_expiry) ~= count + ghosts then
    error(STRANGE, 0)
  end
elseif op > 0 then
  return 0
elseif existing_only == 1 and not again then
  return ''
else
  if not again then strange = 8 end
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
      if known then strange = (strange or 0) + 4 end
    end
  end
  -- Clients may hold what has just been dropped, however old the store is.
  if again then born = now end
  -- A Redis that evicts keys may have left these.
  call('UNLINK', by_wants)
  call('UNLINK', by_expiry)
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

local note_bands, write_bands
if banded == 1 then
  local bands, unseen = {}, false
  -- Notes what becomes of the bands of a holder; sign is 1 or -1.
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
          if all - all ~= 0 then error(STRANGE, 0) end
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
    -- The first one has made the hash, which a Redis that evicts keys may also have lost.
    if unseen then call('EXPIREAT', upstream, ttl) end
  end
end

-- Those whose leases have expired leave the sums, and the holder itself does until it is put
-- back. To take many out of the sorted sets takes longer than to take them out of the sums: as
-- long as not all have been, the first `ghosts` by expiry count no more, but are still there.
local gone = {}
if due <= now_s or ghosts > 0 then
  local expired = call('ZCOUNT', by_expiry, '-inf', now_s) - ghosts
  expired = min(max(expired, 0), DROP_LIMIT)
  local ids, swept = nil, 0
  if expired > 0 then
    ids = call('ZRANGE', by_expiry, ghosts, ghosts + expired - 1)
    local bands, at = 0, 0
    while bands < DROP_LIMIT and at < expired do
      local page = call('HMGET', holders, unpack(ids, at + 1, min(at + DROP_PAGE, expired)))
      for i = 1, #page do
        local bytes = page[i]
        at = at + 1
        gone[at] = bytes
        bands = bands + (#bytes - 12) / 20
        if bands >= DROP_LIMIT then break end
      end
    end
    for i = at + 1, expired do ids[i] = nil end
    expired = at
    ghosts = ghosts + expired
  end
  local place = record and call('ZRANK', by_expiry, id)
  if place and place < ghosts then record = false else place = nil end
  if ghosts > 0 and expired <= SWEEP_LIMIT then
    if expired < ghosts then
      ids = call('ZRANGE', by_expiry, 0, min(ghosts, SWEEP_LIMIT) - 1)
    end
    swept = #ids
    call('HDEL', holders, unpack(ids))
    call('ZREM', by_wants, unpack(ids))
    call('ZREMRANGEBYRANK', by_expiry, 0, swept - 1)
    ghosts = ghosts - swept
  end
  if place and place >= swept and op == 0 then
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
  if not (held >= 0 and wants >= 0 and n > 0) then error(STRANGE, 0) end
  -- Sum::add, twice.
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
-- More cannot have gone than there was.
if not (count >= 0 and has >= least) then error(STRANGE, 0) end
if count == 0 then
  -- Nothing is left to be wrong by.
  has, has_lo = 0, 0
  if ghosts > 0 or found[1] and not record then
    above, above_lo, above_n, below, below_lo, below_n = 0, 0, 0, 0, 0, 0
    call('UNLINK', holders)
    call('UNLINK', by_wants)
    call('UNLINK', by_expiry)
    ghosts, due, old_expiry, old_wants = 0, math.huge, nil, nil
  end
  -- What has become empty is made anew, without an expiry.
  if not old_wants then ttl = 0 end
end

if op > 0 then
  if record then
    call('HDEL', holders, id)
    call('ZREM', by_wants, id)
    call('ZREM', by_expiry, id)
  end
  if count <= 0 then
    forget_all()
    redis.pcall('ZREM', ARGV[6], ARGV[4])
  else
    call('HSET', holders, '', pack('<dddddddddddddddd', above, above_lo, above_n, below, below_lo,
      below_n, has, has_lo, low, high, count, due, ttl, born, banded, ghosts))
    if write_bands then write_bands() end
  end
  return record and 1 or 0
end

-- What there is to share, and by which rule.
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
      error(STRANGE, 0)
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
-- Where nobody is between, the threshold may go to either side of this one.
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
-- Nobody crosses the threshold while there are some who count no more: any threshold will do.
if total > capacity and ghosts == 0 then
  local target = level(below, below_lo, above_n, all_n)
  if target >= high or target < low then
    -- Moves the threshold past as many holders as the level is past, or as one decision may.
    local function cross(up)
      local moved, size = 0, 2
      -- What the holders of one place in the order want, and their subclients; `members` is nil
      -- if they have not all been read. Nil if that is more to read than one decision may: then
      -- the next begins with this place. A place that alone is too much, of more than some 250
      -- servers that want exactly the same, is never crossed, which errs on the side of less.
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
          -- Servers sort after all clients of the same place.
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
          -- The last ones stay: while all want more than there is, somebody does.
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
            -- The next page begins behind this place.
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

-- Whatever was not a number has come to this.
local all = above + below + has + granted
if all - all ~= 0 then error(STRANGE, 0) end

-- A cluster keeps what it has leased out until its clients have given it back.
local kept = granted
if string.byte(id) == SERVER then kept = max(kept, min(claimed, old_has)) end
kept = min(kept, most)
local expiry = min(last_expiry, now_s + lease_s)
-- What is learned before the parent has leased anything ends when it would have.
if from_parent == 1 and parent_refresh < 0 and learning > 0 and granted > 0 then
  expiry = min(expiry, claim_expiry)
end
has, has_lo = add(has, has_lo, kept)
if ghosts > 0 then
  -- Behind those that count no more, also after the clock has stepped back.
  call('ZADD', by_expiry, max(expiry, due + 1), id)
else
  if old_expiry ~= expiry then call('ZADD', by_expiry, expiry, id) end
  due = min(due, expiry)
end
-- The keys outlive every lease, and are told so once a lease length; so is the server's register.
local fresh, listed = expiry > ttl, false
local last = expiry + lease_s
if fresh then
  if ARGV[6] ~= '' then
    local added = redis.pcall('ZADD', ARGV[6], last, ARGV[4])
    if type(added) == 'table' and string.find(added.err, '^WRONGTYPE ') then
      call('DEL', ARGV[6])
      added = call('ZADD', ARGV[6], last, ARGV[4])
      strange = (strange or 0) + 2
    end
    listed = type(added) == 'number'
  end
  ttl = listed and last or expiry
end
call('HSET', holders, id, pack('<dI4', kept, expiry) .. asked,
  '', pack('<dddddddddddddddd', above, above_lo, above_n, below, below_lo,
    below_n, has, has_lo, low, high, count, due, ttl, born, banded, ghosts))
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
return strange and reply .. pack('<d', strange) or reply
