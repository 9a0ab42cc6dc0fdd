-- Copies of a resource that domains hold. Mirrors server/src/domain/holds.rs, which explains the semantics.
-- Atomic, because what is granted depends on all that is held. lua/guard.lua goes around it.
--
-- KEYS[1]  the holds: a hash (see below)
-- KEYS[2]  the index of the holds: a sorted set. Both keys exist, or neither, so that both can be declared
--          while Redis Cluster moves their slot.
-- ARGV[1]  doubles:
--            1 operation: 0 reserve, 1 release, 2 keep alive, 3 end the session, 4 list
--            2 the time in µs, for tests; 0: the server's own
--            3 time to live of the session, in ms; 0: as before
--            4 to reserve: the most copies; to release: the copies to keep
--          and to reserve:
--            5 the least copies
--            6 the most holds on the resource; -1: no limit
--            7 1: the session must exist already
--            8 1: the limits on copies are enforced
--            9 the most copies that all domains may hold, then those that each group of the domain may, and
--              at last those that the domain may; -1: no limit
-- ARGV[2]  the session
-- ARGV[3]  the hold; '' if the operation needs none
-- ARGV[4]  to reserve: the groups of the domain, and the domain; to list: groups, and nothing. Written as: how
--          many groups, as I2; each group, with its length as B before it; the domain
--
-- Hash: the field '' has the copies that are held, the number of holds, and the last number of a session;
-- 'd' and a domain, or 'g' and a group: the copies that it holds; 's' and a session: its number, its time to
-- live in ms, and the bytes of its holds; 'h', the number of the session and a hold: its copies, and then the
-- groups and the domain that they count in, as in ARGV[4]. All numbers are I7; that of a session in the name of
-- a field is big-endian, so that the index sorts as the names do.
-- Index: the fields of the sessions by their end, in ms, and those of the holds by the negated number of
-- their session.
-- Both keys expire with the last session.
--
-- Reply: 1 if a corrupt record was replaced; then
--   to reserve: the outcome (0 made, 1 known, 2 no room, 3 too many, 4 other domain), the copies granted, the
--     copies that enforced limits grant, 1 if there are more sessions to free; the copies that all hold, those
--     that each group of the domain holds, and those that the domain holds;
--   to release: the copies left;
--   to keep alive: when the session ends, in ms, 0 if it does not live; then for each hold its name and its
--     value in the hash;
--   to end: the copies that the session held;
--   to list: the copies that all hold, the number of holds, 1 if there are more sessions; the copies that each
--     group holds; a list of the sessions, each with its name, its end in ms, and its holds as above.

local corrupt = ...
local RESERVE, RELEASE, KEEP_ALIVE, END = 0, 1, 2, 3
local MAX_HELD, MAX_SESSION_BYTES, HOLD_BYTES, FREE_LIMIT = 1000000000000000, 30000, 38, 100
local LIST_BYTES, SESSION_BYTES = 500000, 200
local call, pack, unpacked, min, max = redis.call, struct.pack, struct.unpack, math.min, math.max

local holds, index = KEYS[1], KEYS[2]
local op, now, ttl, copies = unpacked('<dddd', ARGV[1])
local session, hold, members = 's' .. ARGV[2], ARGV[3], ARGV[4]
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

-- The fields that count the copies of a hold: those of its groups, and at last that of its domain. They are
-- written in `text` from `at` on, as in ARGV[4].
local function fields_of(text, at)
  local fields = {}
  local groups, at = unpacked('<I2', text, at)
  for nth = 1, groups do
    fields[nth], at = unpacked('Bc0', text, at)
    fields[nth] = 'g' .. fields[nth]
  end
  fields[groups + 1] = 'd' .. string.sub(text, at)
  return fields
end

-- What has changed: the copies that domains and groups hold, by field. Written at the end.
local counts, is_changed, is_emptied = {}, false, false
local function held_by(field)
  if not counts[field] then
    local value = call('HGET', holds, field)
    counts[field] = value and unpacked('<I7', value) or 0
  end
  return counts[field]
end
local function change(fields, by)
  for _, field in ipairs(fields) do
    counts[field] = held_by(field) + by
    assert(counts[field] >= 0)
  end
  all_held = all_held + by
  assert(all_held >= 0)
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
      change(fields_of(value, 8), -copies)
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
    for field, copies in pairs(counts) do
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

-- Adds the holds of a session to a reply.
local function add_holds(reply, number)
  local names = call('ZRANGEBYSCORE', index, -number, -number)
  if #names == 0 then return end
  for i, value in ipairs(call('HMGET', holds, unpack(names))) do
    reply[#reply + 1] = string.sub(names[i], 9)
    reply[#reply + 1] = assert(value)
  end
end

local function name_of(number, hold) return 'h' .. pack('>I7', number) .. hold end

if op == RESERVE then
  local least, max_holds, known_only, enforced, global_limit = unpacked('<ddddd', ARGV[1], 33)
  local fields = fields_of(members, 1)
  local function answer(outcome, granted, allowed)
    local reply = { replaced, outcome, granted, allowed, has_backlog, all_held }
    for _, field in ipairs(fields) do reply[#reply + 1] = held_by(field) end
    return finish(reply)
  end
  local value = number and call('HGET', holds, name_of(number, hold))
  if value then
    local its_fields = fields_of(value, 8)
    if its_fields[#its_fields] ~= fields[#fields] then return answer(4, 0, 0) end
    renew()
    return answer(1, (unpacked('<I7', value)), 0)
  end
  if number then
    renew()
  else
    bytes = 0
  end
  local more = HOLD_BYTES + #hold + #members
  local function room(limit, held) return max((limit < 0 and MAX_HELD or limit) - held, 0) end
  local most = min(copies, MAX_HELD - all_held)
  local allowed = min(most, room(global_limit, all_held))
  for nth, field in ipairs(fields) do
    local limit = unpacked('<d', ARGV[1], 65 + 8 * nth)
    allowed = min(allowed, room(limit, held_by(field)))
  end
  if allowed < least then allowed = 0 end
  local granted = enforced == 1 and allowed or most
  local too_many = (max_holds >= 0 and count >= max_holds) or bytes + more > MAX_SESSION_BYTES
    or (known_only == 1 and not number)
  if too_many or granted < least then
    return answer(too_many and 3 or 2, 0, allowed)
  end
  if not number then
    last = last + 1
    number, old_ttl = last, nil
    renew()
  end
  local name = name_of(number, hold)
  put(name, pack('<I7', granted) .. members)
  change_bytes(more)
  call('ZADD', index, -number, name)
  change(fields, granted)
  count = count + 1
  return answer(0, granted, allowed)
end

if op == RELEASE then
  local left = 0
  if number then
    local name = name_of(number, hold)
    local value = call('HGET', holds, name)
    if value then
      local had = unpacked('<I7', value)
      left = min(had, copies)
      if left < had then change(fields_of(value, 8), left - had) end
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
  add_holds(reply, number)
  return finish(reply)
end

if op == END then return finish({ replaced, number and forget(session) or 0 }) end

local reply, sessions, listed = { replaced, all_held, count, 0 }, {}, 0
local groups = fields_of(members, 1)
for nth = 1, #groups - 1 do reply[#reply + 1] = held_by(groups[nth]) end
local most = LIST_BYTES / SESSION_BYTES + 1
local live = call('ZRANGEBYSCORE', index, now + 1, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
for at = 1, #live, 2 do
  if listed >= LIST_BYTES then
    reply[4] = 1
    break
  end
  local number, _, bytes = find(live[at])
  local session = { string.sub(live[at], 2), tonumber(live[at + 1]) }
  add_holds(session, assert(number))
  sessions[#sessions + 1] = session
  listed = listed + SESSION_BYTES + bytes
end
reply[#reply + 1] = sessions
return finish(reply)
