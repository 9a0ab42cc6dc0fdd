-- Precedes allow.lua and throttle.lua. Mirrors domain::log: change the two together.
--
-- A log is a string: for each of up to 128 hits '<I7', its time in µs, ascending. One with more hits is '<I7I7B',
-- the window, when slot 0 began, and the number of the last slot, and 129 '<I4': the hits up to the end of the
-- slot before the last 128, and of each of these, modulo 2^32. Without hits it is empty.
--
-- The functions use no locals around them, which would make each call of a script slower: see allow.lua.

local function new_log()
  return {
    -- Whether a string is a log with hits, or at least one that can do no harm.
    is_log = function(value)
      if #value ~= 531 then return #value > 0 and #value % 7 == 0 and #value <= 896 end
      local window, _, last = struct.unpack('<I7I7B', value)
      return window > 0 and window <= 31622400000000 and last < 128
    end,

    slot = function(start, window, at) return math.floor((at - start) * 128 / window) end,

    -- The time of the last hit, or when its slot began.
    last_at = function(log)
      if #log ~= 531 then return (struct.unpack('<I7', log, #log - 6)) end
      local window, start, last = struct.unpack('<I7I7B', log)
      return start + math.ceil(last * window / 128)
    end,

    -- Of a log with times: the index of the first one in the window.
    first_counting = function(log, window, at)
      local earliest = at - window
      -- Nearly always it is the first.
      local low, middle, high = 1, 1, #log / 7 + 1
      while low < high do
        if struct.unpack('<I7', log, middle * 7 - 6) < earliest then low = middle + 1 else high = middle end
        middle = math.floor((low + high) / 2)
      end
      return low
    end,

    -- The hits up to the end of a slot, modulo 2^32. If the window of the log is another one, the hits of a
    -- slot count in the one that begins nearest.
    sum = function(log, window, slot)
      local own_window, _, last = struct.unpack('<I7I7B', log)
      local own = slot
      if own_window ~= window then
        if slot >= math.floor(last * own_window / window) then
          own = last
        else
          own = math.ceil((2 * slot + 1) * window / (2 * own_window)) - 1
        end
      end
      local index = math.min(math.max(128 + own - last, 0), 128)
      return (struct.unpack('<I4', log, 16 + 4 * index))
    end,

    -- The hits in the window.
    hits = function(self, log, window, at)
      if #log ~= 531 then
        if log == '' then return 0 end
        return #log / 7 - self.first_counting(log, window, at) + 1
      end
      local start = struct.unpack('<I7', log, 8)
      local slot = self.slot(start, window, at)
      return (self.sum(log, window, slot) - self.sum(log, window, slot - 128)) % 4294967296
    end,

    -- The sums, as bytes, when `slot` is the last one.
    sums_at = function(self, log, window, start, slot)
      local sums = {}
      if #log ~= 531 then
        local i, hits = 1, #log / 7
        for at = slot - 128, slot do
          while i <= hits and self.slot(start, window, (struct.unpack('<I7', log, i * 7 - 6))) <= at do
            i = i + 1
          end
          sums[#sums + 1] = struct.pack('<I4', i - 1)
        end
        return table.concat(sums)
      end
      local own_window, _, last = struct.unpack('<I7I7B', log)
      if own_window == window then
        local by = math.min(slot - last, 129)
        assert(by >= 0)
        return string.sub(log, 16 + 4 * by) .. string.rep(string.sub(log, -4), by)
      end
      for at = slot - 128, slot do sums[#sums + 1] = struct.pack('<I4', self.sum(log, window, at)) end
      return table.concat(sums)
    end,

    -- The hits in the window, of which there are few, each at the beginning of its slot: a log with times.
    times = function(self, log, window, at)
      local start, hits = struct.unpack('<I7', log, 8), self:hits(log, window, at)
      local last, times, count = self.slot(start, window, at), {}, 0
      local before = self.sum(log, window, last - 128)
      for slot = last - 127, last do
        local begins = struct.pack('<I7', start + math.ceil(slot * window / 128))
        local until_then = math.min((self.sum(log, window, slot) - before) % 4294967296, hits)
        times[#times + 1] = string.rep(begins, until_then - count)
        count = math.max(count, until_then)
      end
      return table.concat(times)
    end,

    -- The log with more hits, for which the limit leaves room, and the hits in the window then. `before`: those in
    -- it until now, if they are known.
    add = function(self, log, window, limit, at, hits, before)
      before = before or self:hits(log, window, at)
      if before == 0 then log = '' end
      -- The limit was lowered. (With a greater one there may soon be slots again, and hits would be moved to
      -- the beginning of one each time.)
      if #log == 531 and math.max(limit, before + hits) <= 128 then log = self:times(log, window, at) end
      if #log ~= 531 then
        if before * 7 < #log then log = string.sub(log, -7 * before) end
        if before + hits <= 128 then
          return log .. string.rep(struct.pack('<I7', at), hits), before + hits
        end
      end
      local start = at
      if #log == 531 then
        start = struct.unpack('<I7', log, 8)
      elseif log ~= '' then
        start = struct.unpack('<I7', log)
      end
      local slot = self.slot(start, window, at)
      local sums = self:sums_at(log, window, start, slot)
      local newest = (struct.unpack('<I4', sums, #sums - 3) + hits) % 4294967296
      -- The numbers stay small, however long the log is in use.
      local last = slot % 128
      start = start + (slot - last) / 128 * window
      log = struct.pack('<I7I7B', window, start, last) .. string.sub(sums, 1, -5) .. struct.pack('<I4', newest)
      return log, self:hits(log, window, at)
    end,

    -- The log without the last hits.
    take_back = function(self, log, window, at, hits)
      local before = self:hits(log, window, at)
      if hits >= before then return '' end
      if #log ~= 531 then return string.sub(log, 1, -7 * hits - 1) end
      local first = struct.unpack('<I4', log, 16)
      local left = (struct.unpack('<I4', log, 528) - first) % 4294967296 - hits
      local sums = {}
      for i = 1, 129 do
        local sum = struct.unpack('<I4', log, 12 + 4 * i)
        sums[i] = struct.pack('<I4', (first + math.min((sum - first) % 4294967296, left)) % 4294967296)
      end
      return string.sub(log, 1, 15) .. table.concat(sums)
    end,

    -- The first time, from `at` on, when there is room for `needed` hits if no others come; nil: never.
    room_at = function(self, log, window, limit, at, needed)
      if needed > limit then return nil end
      local expiring = self:hits(log, window, at) - (limit - needed)
      if expiring <= 0 then return at end
      if #log ~= 531 then
        local first = self.first_counting(log, window, at) + expiring - 1
        return struct.unpack('<I7', log, first * 7 - 6) + window + 1
      end
      local start = struct.unpack('<I7', log, 8)
      local high = self.slot(start, window, at)
      local low = high - 128
      local before = self.sum(log, window, low)
      while low + 1 < high do
        local middle = math.floor((low + high) / 2)
        if (self.sum(log, window, middle) - before) % 4294967296 >= expiring then
          high = middle
        else
          low = middle
        end
      end
      -- Slot `high` expires when 128 later ones begin.
      return start + math.ceil((high + 128) * window / 128)
    end,
  }
end

