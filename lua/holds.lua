-- Copies of a resource that domains hold. Mirrors server/src/domain/holds.rs, which explains the semantics.
-- Atomic, because what is granted depends on all that is held. lua/guard.lua goes around it, and
-- lua/parts.lua calls it for many requests at once.
--
-- Keys:
--   1  the holds: a hash (see below)
--   2  the index of the holds: a sorted set. Both exist, or neither, so that the server that gives away their slot
--      has both, or none.
-- Arguments:
--   1  doubles:
--        1 operation: 0 reserve, 1 release, 2 keep alive, 3 end the session, 4 list, 5 transfer
--        2 the time in µs, for tests; 0: the server's own
--        3 time to live of the session, in ms; 0: as before; to transfer: that of the other session
--        4 to reserve: the most copies; to release: the copies to keep; to transfer: the most
--          copies to move
--      to reserve and to transfer:
--        5 the most holds on the resource; -1: no limit
--        6 1: the session must exist already; to transfer: the other session
--      and to reserve:
--        7 the least copies
--        8 1: the limits on copies are enforced
--        9 the most copies that all domains may hold, then those that each group of the domain may, and
--          at last those that the domain may; -1: no limit
--   2  the session
--   3  the hold; '' if the operation needs none
--   4  to transfer: the other session; to reserve: the groups of the domain, and the domain; to list:
--      groups, and nothing. Written as: how many groups, as I2; each group, with its length as B before it;
--      the domain
--
-- Hash: the field '' has the copies that are held, the number of holds, and the last number of a session;
-- 'd' and a domain, or 'g' and a group: the copies that it holds; 's' and a session: its number, its time to
-- live in ms, and the bytes of its holds; 'h', the number of the session and a hold: its copies, and then the
-- groups and the domain that they count in, as in the last argument. All numbers are I7; that of a session in the
-- name of a field is big-endian, so that the index sorts as the names do.
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
--     group holds; a list of the sessions, each with its name, its end in ms, and its holds as above;
--   to transfer: the outcome (0 moved, 1 too many, 2 no such hold, 3 other domain), the copies in the other
--     session.

local RESERVE, RELEASE, KEEP_ALIVE, END, LIST = 0, 1, 2, 3, 4
local MAX_HELD, MAX_SESSION_BYTES, HOLD_BYTES = 1000000000000000, 30000, 38
local LIST_BYTES, SESSION_BYTES = 500000, 200
-- How much is freed of sessions that are over: by all parts of a call, and by each in any case.
local left_to_free, FREE_AT_LEAST = 100, 3
local call, pack, unpacked = redis.call, struct.pack, struct.unpack
local min, max, floor = math.min, math.max, math.floor

-- Making a function that uses locals around it takes Redis as long as a command. So they are made here, once for
-- all parts of a call, and work on these. `run` sets them anew for each part.
local holds, index, hold, now
-- What the field '' of the hash has.
local all_held, count, last
-- What has changed: whether that has; the copies that domains and groups hold, by field; other fields to set, each
-- with its value after it. Written at the end.
local is_changed, counts, set
-- The sessions and holds to remove, by field and in a list. They are removed last, as a key is gone once it is
-- empty, and a server that gives away its slot refuses commands on a key that it does not have.
local is_gone, gone
-- When the session that was renewed last ends, 0 if none was.
local ends
-- For the reply: 1 if a corrupt record was replaced; 1 if there are more sessions to free.
local replaced, has_backlog

-- The fields that count the copies of a hold: those of its groups, and at last that of its domain. They are
-- written in `text` from `at` on, as in the last argument.
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

-- Lua can pass on a few thousand values at most.
local function in_parts(command, key, values)
  for at = 1, #values, 1000 do call(command, key, unpack(values, at, min(at + 999, #values))) end
end

local function remove(field)
  is_gone[field] = true
  gone[#gone + 1] = field
end
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

-- A session by its field; nil if there is none. It may be over.
local function find(field)
  local value = not is_gone[field] and call('HGET', holds, field)
  if not value then return end
  local number, ttl, bytes = unpacked('<I7I7I7', value)
  return { field = field, number = number, ttl = ttl, bytes = bytes }
end

-- Forgets a session and what it holds: so many copies, in so many counts.
local function forget(session)
  local field, number = session.field, session.number
  local freed, changed, members = 0, 0, call('ZRANGEBYSCORE', index, -number, -number)
  if #members > 0 then
    for _, value in ipairs(call('HMGET', holds, unpack(members))) do
      local copies = unpacked('<I7', value)
      local fields = fields_of(value, 8)
      change(fields, -copies)
      freed, changed = freed + copies, changed + #fields
    end
    for _, member in ipairs(members) do remove(member) end
  end
  remove(field)
  count = count - #members
  is_changed = true
  return freed, changed
end

-- A live session by its name; nil if there is none.
local function find_live(name)
  local session = find('s' .. name)
  if session and tonumber(assert(call('ZSCORE', index, session.field))) <= now then
    forget(session)
    return
  end
  return session
end
local function put(field, value)
  set[#set + 1] = field
  set[#set + 1] = value
end
-- A new session: renew it, and give it a hold.
local function begin(name)
  last = last + 1
  is_changed = true
  local field = 's' .. name
  -- Its record takes the place of that of one that was over.
  is_gone[field] = nil
  return { field = field, number = last, ttl = 0, bytes = 0 }
end
-- Renews a session, with a new time to live unless it is 0, and with so many more bytes of holds.
local function renew(session, ttl, more)
  if ttl == 0 then ttl = session.ttl end
  if ttl ~= session.ttl or more ~= 0 then
    session.ttl, session.bytes = ttl, session.bytes + more
    assert(session.bytes >= 0)
    put(session.field, pack('<I7I7I7', session.number, ttl, session.bytes))
  end
  ends = now + ttl
  call('ZADD', index, ends, session.field)
end

-- Writes what has changed, and lets the keys live as long as the last session.
local function finish(reply)
  local removed, cleared = {}, {}
  for _, field in ipairs(gone) do
    if is_gone[field] then
      removed[#removed + 1], cleared[#cleared + 1] = field, field
    end
  end
  if #removed > 0 and call('ZCARD', index) == #removed then
    call('UNLINK', holds)
    call('UNLINK', index)
    return reply
  end
  if is_changed then
    put('', pack('<I7I7I7', all_held, count, last))
    for field, copies in pairs(counts) do
      if copies > 0 then put(field, pack('<I7', copies)) else cleared[#cleared + 1] = field end
    end
  end
  in_parts('HSET', holds, set)
  in_parts('HDEL', holds, cleared)
  in_parts('ZREM', index, removed)
  if ends > 0 or #removed > 0 then
    local last_end = call('ZREVRANGE', index, 0, 0, 'WITHSCORES')[2]
    call('PEXPIREAT', holds, last_end)
    call('PEXPIREAT', index, last_end)
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

-- The field of a hold, and its value; nil if there is none.
local function find_hold(session)
  local name = 'h' .. pack('>I7', session.number) .. hold
  return name, call('HGET', holds, name)
end
local function write_hold(session, name, copies, members)
  put(name, pack('<I7', copies) .. members)
  call('ZADD', index, -session.number, name)
end

-- Whether there would be too many holds, with one of so many bytes more in a session that may be new.
local function is_too_many(max_holds, known_only, session, more)
  return (max_holds >= 0 and count >= max_holds)
    or (session and session.bytes or 0) + more > MAX_SESSION_BYTES
    or (known_only == 1 and not session)
end

-- The room that a limit leaves.
local function room(limit, held) return max((limit < 0 and MAX_HELD or limit) - held, 0) end
-- The reply to a request for copies.
local function reserved(fields, outcome, granted, allowed)
  local reply = { replaced, outcome, granted, allowed, has_backlog, all_held }
  for _, field in ipairs(fields) do reply[#reply + 1] = held_by(field) end
  return finish(reply)
end

local function run(corrupt, keys, key, args, arg, server_time)
  local numbers, session_name, last_arg = args[arg], args[arg + 1], args[arg + 3]
  local op, simulated_now, ttl, copies = unpacked('<dddd', numbers)
  local simulated = simulated_now ~= 0
  holds, index, hold = keys[key], keys[key + 1], args[arg + 2]
  now = floor((simulated and simulated_now or server_time) / 1000)
  is_changed, counts, set, is_gone, gone, ends = false, {}, {}, {}, {}, 0
  replaced, has_backlog = corrupt and 1 or 0, 0
  if corrupt or (simulated and now > max(call('PEXPIRETIME', holds), 0)) then
    call('UNLINK', holds)
    call('UNLINK', index)
  end

  local header = call('HGET', holds, '')
  if header then
    all_held, count, last = unpacked('<I7I7I7', header)
  else
    all_held, count, last = 0, 0, 0
    call('UNLINK', index)
  end

  local freed = 0
  if header then
    local most = max(left_to_free, FREE_AT_LEAST)
    for _, field in ipairs(call('ZRANGEBYSCORE', index, 0, now, 'LIMIT', 0, most + 1)) do
      if freed >= most then
        has_backlog = 1
        break
      end
      local _, changed = forget(assert(find(field)))
      freed = freed + 1 + changed
    end
    left_to_free = left_to_free - freed
  end
  local session = find_live(session_name)

  if op == RESERVE then
    local max_holds, known_only, least, enforced, global_limit = unpacked('<ddddd', numbers, 33)
    local members = last_arg
    local fields = fields_of(members, 1)
    local name, value
    if session then name, value = find_hold(session) end
    if value then
      local its_fields = fields_of(value, 8)
      if its_fields[#its_fields] ~= fields[#fields] then return reserved(fields, 4, 0, 0) end
      renew(session, ttl, 0)
      return reserved(fields, 1, (unpacked('<I7', value)), 0)
    end
    local most = min(copies, MAX_HELD - all_held)
    local allowed = min(most, room(global_limit, all_held))
    for nth, field in ipairs(fields) do
      local limit = unpacked('<d', numbers, 65 + 8 * nth)
      allowed = min(allowed, room(limit, held_by(field)))
    end
    if allowed < least then allowed = 0 end
    local granted = enforced == 1 and allowed or most
    local more = HOLD_BYTES + #hold + #members
    local too_many = is_too_many(max_holds, known_only, session, more)
    if too_many or granted < least then
      if session then renew(session, ttl, 0) end
      return reserved(fields, too_many and 3 or 2, 0, allowed)
    end
    if not session then
      session = begin(session_name)
      name = find_hold(session)
    end
    write_hold(session, name, granted, members)
    renew(session, ttl, more)
    change(fields, granted)
    count = count + 1
    return reserved(fields, 0, granted, allowed)
  end

  if op == RELEASE then
    local left = 0
    if session then
      local freed_bytes, name, value = 0, find_hold(session)
      if value then
        local had, members = unpacked('<I7', value), string.sub(value, 8)
        left = min(had, copies)
        if left < had then change(fields_of(members, 1), left - had) end
        if left == 0 then
          remove(name)
          count = count - 1
          freed_bytes = HOLD_BYTES + #hold + #members
        elseif left < had then
          put(name, pack('<I7', left) .. members)
        end
      end
      renew(session, 0, -freed_bytes)
    end
    return finish({ replaced, left })
  end

  if op == KEEP_ALIVE then
    if not session then return finish({ replaced, 0 }) end
    renew(session, ttl, 0)
    local reply = { replaced, ends }
    add_holds(reply, session.number)
    return finish(reply)
  end

  if op == END then return finish({ replaced, session and forget(session) or 0 }) end

  if op == LIST then
    local reply, sessions, listed = { replaced, all_held, count, 0 }, {}, 0
    local groups = fields_of(last_arg, 1)
    for nth = 1, #groups - 1 do reply[#reply + 1] = held_by(groups[nth]) end
    local most = LIST_BYTES / SESSION_BYTES + 1
    local live = call('ZRANGEBYSCORE', index, now + 1, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
    for at = 1, #live, 2 do
      if listed >= LIST_BYTES then
        reply[4] = 1
        break
      end
      local session = assert(find(live[at]))
      local listing = { string.sub(live[at], 2), tonumber(live[at + 1]) }
      add_holds(listing, session.number)
      sessions[#sessions + 1] = listing
      listed = listed + SESSION_BYTES + session.bytes
    end
    reply[#reply + 1] = sessions
    return finish(reply)
  end

  local max_holds, known_only = unpacked('<dd', numbers, 33)
  local other = find_live(last_arg)
  local name, value, other_name, other_value
  if session then name, value = find_hold(session) end
  if other then other_name, other_value = find_hold(other) end
  if not value and not other_value then return finish({ replaced, 2, 0 }) end
  if value and other_value and string.sub(value, 8) ~= string.sub(other_value, 8) then
    local fields, other_fields = fields_of(value, 8), fields_of(other_value, 8)
    if fields[#fields] ~= other_fields[#other_fields] then return finish({ replaced, 3, 0 }) end
  end
  local function answer(outcome, moved, less, more)
    if session then renew(session, 0, -less) end
    if other then renew(other, ttl, more) end
    return finish({ replaced, outcome, moved })
  end
  if other_value then return answer(0, unpacked('<I7', other_value), 0, 0) end
  local had, members = unpacked('<I7', value), string.sub(value, 8)
  local moved = min(copies, had)
  local is_part, more = moved < had, HOLD_BYTES + #hold + #members
  -- A hold that moves as a whole is no further one.
  if is_too_many(is_part and max_holds or -1, known_only, other, more) then return answer(1, 0, 0, 0) end
  if not other then
    other = begin(last_arg)
    other_name = find_hold(other)
  end
  write_hold(other, other_name, moved, members)
  if is_part then
    put(name, pack('<I7', had - moved) .. members)
    count = count + 1
    is_changed = true
  else
    remove(name)
  end
  return answer(0, moved, is_part and 0 or more, more)
end
