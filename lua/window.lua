-- Precedes allow.lua. Windows, and what was asked for in the window of a ban: see allow.lua. Mirrors
-- domain::window and domain::ban: change them together.
--
-- The functions use no locals around them, as in log.lua.

local function new_windows()
  return {
    -- The counts of a window's state at a time: the time of the request, which is not before the state's; the start
    -- of its window; the time that the state is to have; the tokens of the window, and of the one before; whether
    -- the state is of this window; the time that the state has.
    counts = function(value, now, length)
      local moment, start = now, now - now % length
      if not value then return moment, start, start, 0, 0 end
      local at, current, previous = struct.unpack('<I6I4I4', value)
      local since = (now - at) % 281474976710656
      if since >= 140737488355328 then since = since - 281474976710656 end
      at = now - since
      -- The clock may have stepped back, by an hour at most.
      if at > now + 3600000000 then return moment, start, start, 0, 0, false, at end
      if at > now then
        moment = at
        start = at - at % length
      end
      if at >= start then return moment, start, at, current, previous, true, at end
      if at >= start - length then return moment, start, start, 0, current, false, at end
      return moment, start, start, 0, 0, false, at
    end,

    -- What was asked for in the window of a ban: when it began, the tokens, and whether they are in the state.
    asked_before = function(value, now, length, lasting, cap)
      if not value then return now, 0, false end
      local at, tokens = struct.unpack('<I6I4', value)
      local since = (now - at) % 281474976710656
      if since >= 140737488355328 then since = since - 281474976710656 end
      -- The clock may have stepped back, by an hour at most.
      at = now - since
      if since >= -3600000000 and since < (tokens > cap and lasting or length) then return at, tokens, true, at end
      return now, 0, false, at
    end,

    -- How many µs from `now` until a window has room for `cost` tokens that it has no room for at `moment`; -1:
    -- never.
    room_after = function(now, moment, start, length, sliding, limit, cost, current, previous)
      if cost > limit then return -1 end
      local stop, first = start + length, moment
      if not sliding then return stop - now end
      if current + cost > limit then
        -- In the next window, the current count is that of the window before.
        start, stop, first, current, previous = stop, stop + length, stop, 0, current
      end
      local room = limit - cost - current
      if math.floor(previous * (stop - first) / length) <= room then return first - now end
      -- The share of the window before falls evenly. Rounding may put it a little off.
      local at = start + math.floor(length * (1 - (room + 1) / previous))
      at = math.min(math.max(at, first), stop)
      while at < stop and math.floor(previous * (stop - at) / length) > room do at = at + 1 end
      while at > first and math.floor(previous * (stop - at + 1) / length) <= room do at = at - 1 end
      return at - now
    end,
  }
end
