-- Copies of a resource that domains hold. Mirrors server/src/domain/holds.rs, which explains the semantics.
-- Atomic, because what is granted depends on all that is held. lua/guard.lua goes around it.
--
-- KEYS[1]  the holds: a hash (see below)
-- KEYS[2]  the index of the holds: a sorted set. Both keys exist, or neither, so that both can be declared
--          while Redis Cluster moves their slot.
-- ARGV[1]  doubles:
--            1 operation: 0 reserve, 1 release, 2 keep alive, 3 end the session
--            2 the time in µs, for tests; 0: the server's own
--            3 time to live of the session, in ms; 0: as before
--            4 to reserve: the most copies; to release: the copies to keep
--          and to reserve:
--            5 the least copies
--            6 the most copies that the domain may hold, 7 that all domains may hold; -1: no limit
--            8 the most holds on the resource; -1: no limit
--            9 1: the session must exist already
--           10 1: the limits on copies are enforced
-- ARGV[2]  the session
-- ARGV[3]  the hold, and ARGV[4] the domain; '' if the operation needs none
--
-- Hash: the field '' has the copies that are held, the number of holds, and the last number of a session;
-- 'd' and a domain: the copies that it holds; 's' and a session: its number, its time to live in ms, and the
-- bytes of its holds; 'h', the number of the session and a hold: its copies and its domain. All numbers are I7; that of a session in the
-- name of a field is big-endian, so that the index sorts as the names do.
-- Index: the fields of the sessions by their end, in ms, and those of the holds by the negated number of
-- their session.
-- Both keys expire with the last session.
--
-- Reply: 1 if a corrupt record was replaced; then
--   to reserve: the outcome (0 made, 1 known, 2 no room, 3 too many, 4 other domain), the copies granted, the
--     copies that enforced limits grant, those that the domain holds, those that all hold, 1 if there are
--     more sessions to free;
--   to release: the copies left;
--   to keep alive: when the session ends, in ms, 0 if it does not live; then for each hold its name and its
--     value in the hash;
--   to end: the copies that the session held.

local corrupt = ...
local RESERVE, RELEASE, KEEP_ALIVE = 0, 1, 2
local MAX_HELD, MAX_SESSION_BYTES, HOLD_BYTES, FREE_LIMIT = 1000000000000000, 30000, 40, 100
local call, pack, unpacked, min, max = redis.call, struct.pack, struct.unpack, math.min, math.max

local holds, index = KEYS[1], KEYS[2]
local op, now, ttl, copies = unpacked('<dddd', ARGV[1])
local session, hold, domain = 's' .. ARGV[2], ARGV[3], ARGV[4]
local replaced = corrupt and 1 or 0
local simulated = now ~= 0
if simulated then
  now = math.floor(now / 1000)
else
  local time = call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
if corrupt or (simulated and now > max(call('PEXPIRETIME', holds), 0)) then
  call('UNLINK', holds)
  call('UNLINK', index)
end

local header = call('HGET', holds, '')
local all_held, count, last = 0, 0, 0
if header then
  all_held, count, last = unpacked('<I7I7I7', header)
else
  call('UNLINK', index)
end

-- What has changed: the copies that domains hold, by field. Written at the end.
local domains, is_changed, is_emptied = {}, false, false
local function held_by(field)
  if not domains[field] then
    local value = call('HGET', holds, field)
    domains[field] = value and unpacked('<I7', value) or 0
  end
  return domains[field]
end
local function change(field, by)
  domains[field] = held_by(field) + by
  all_held = all_held + by
  assert(domains[field] >= 0 and all_held >= 0)
  is_changed = true
end

-- The number of a session, its time to live and the bytes of its holds; nil if there is none.
local function find(field)
  local value = call('HGET', holds, field)
  if value then return unpacked('<I7I7I7', value) end
end

-- Forgets a session and what it holds: so many copies, and so many holds.
local function forget(field)
  local number = assert(find(field))
  local freed, members = 0, call('ZRANGEBYSCORE', index, -number, -number)
  if #members > 0 then
    for _, value in ipairs(call('HMGET', holds, unpack(members))) do
      local copies = unpacked('<I7', value)
      change('d' .. string.sub(value, 8), -copies)
      freed = freed + copies
    end
    call('HDEL', holds, unpack(members))
    call('ZREM', index, unpack(members))
  end
  call('HDEL', holds, field)
  call('ZREM', index, field)
  count = count - #members
  is_changed, is_emptied = true, true
  return freed, #members
end

local freed, has_backlog = 0, 0
if header then
  for _, field in ipairs(call('ZRANGEBYSCORE', index, 0, now, 'LIMIT', 0, FREE_LIMIT + 1)) do
    if freed >= FREE_LIMIT then
      has_backlog = 1
      break
    end
    local _, holds_freed = forget(field)
    freed = freed + 1 + holds_freed
  end
end
local number, old_ttl, bytes = find(session)
if number and tonumber(assert(call('ZSCORE', index, session))) <= now then
  forget(session)
  number = nil
end
local function is_empty() return is_emptied and call('ZCARD', index) == 0 end
if is_empty() then
  -- The index has gone, and with it the time when it expires.
  call('UNLINK', holds)
end

-- Fields of the hash to set.
local set = {}
local function put(field, value)
  set[#set + 1] = field
  set[#set + 1] = value
end
local ends = 0
local function renew()
  if ttl == 0 then ttl = old_ttl end
  ends = now + ttl
  if ttl ~= old_ttl then put(session, pack('<I7I7I7', number, ttl, bytes)) end
  call('ZADD', index, ends, session)
end
local function change_bytes(by)
  bytes = bytes + by
  assert(bytes >= 0)
  put(session, pack('<I7I7I7', number, ttl == 0 and old_ttl or ttl, bytes))
end

-- Writes what has changed, and lets the keys live as long as the last session.
local function finish(reply)
  if is_changed then
    put('', pack('<I7I7I7', all_held, count, last))
    for field, copies in pairs(domains) do
      if copies > 0 then put(field, pack('<I7', copies)) else call('HDEL', holds, field) end
    end
  end
  if is_empty() then
    call('UNLINK', holds)
    return reply
  end
  if #set > 0 then call('HSET', holds, unpack(set)) end
  if ends > 0 or is_emptied then
    local last_end = call('ZREVRANGE', index, 0, 0, 'WITHSCORES')[2]
    for _, key in ipairs(KEYS) do call('PEXPIREAT', key, last_end) end
  end
  return reply
end

local function name_of(number, hold) return 'h' .. pack('>I7', number) .. hold end

if op == RESERVE then
  local least, domain_limit, global_limit, max_holds, known_only, enforced =
    unpacked('<dddddd', ARGV[1], 33)
  local field = 'd' .. domain
  local held = held_by(field)
  local value = number and call('HGET', holds, name_of(number, hold))
  if value then
    if string.sub(value, 8) ~= domain then
      return finish({ replaced, 4, 0, 0, held, all_held, has_backlog })
    end
    renew()
    return finish({ replaced, 1, unpacked('<I7', value), 0, held, all_held, has_backlog })
  end
  if number then
    renew()
  else
    bytes = 0
  end
  local more = HOLD_BYTES + #hold + #domain
  local function room(limit, held) return max((limit < 0 and MAX_HELD or limit) - held, 0) end
  local most = min(copies, MAX_HELD - all_held)
  local allowed = min(most, room(domain_limit, held), room(global_limit, all_held))
  if allowed < least then allowed = 0 end
  local granted = enforced == 1 and allowed or most
  local too_many = (max_holds >= 0 and count >= max_holds) or bytes + more > MAX_SESSION_BYTES
    or (known_only == 1 and not number)
  if too_many or granted < least then
    return finish({ replaced, too_many and 3 or 2, 0, allowed, held, all_held, has_backlog })
  end
  if not number then
    last = last + 1
    number, old_ttl = last, nil
    renew()
  end
  local name = name_of(number, hold)
  put(name, pack('<I7', granted) .. domain)
  change_bytes(more)
  call('ZADD', index, -number, name)
  change(field, granted)
  count = count + 1
  return finish({ replaced, 0, granted, allowed, domains[field], all_held, has_backlog })
end

if op == RELEASE then
  local left = 0
  if number then
    local name = name_of(number, hold)
    local value = call('HGET', holds, name)
    if value then
      local had = unpacked('<I7', value)
      left = min(had, copies)
      if left < had then change('d' .. string.sub(value, 8), left - had) end
      if left == 0 then
        call('HDEL', holds, name)
        call('ZREM', index, name)
        count = count - 1
        change_bytes(-HOLD_BYTES - #hold - #value + 7)
      elseif left < had then
        put(name, pack('<I7', left) .. string.sub(value, 8))
      end
    end
    renew()
  end
  return finish({ replaced, left })
end

if op == KEEP_ALIVE then
  if not number then return finish({ replaced, 0 }) end
  renew()
  local reply = { replaced, ends }
  local names = call('ZRANGEBYSCORE', index, -number, -number)
  if #names > 0 then
    for i, value in ipairs(call('HMGET', holds, unpack(names))) do
      reply[#reply + 1] = string.sub(names[i], 9)
      reply[#reply + 1] = assert(value)
    end
  end
  return finish(reply)
end

return finish({ replaced, number and forget(session) or 0 })
