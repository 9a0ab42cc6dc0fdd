-- The least that a token bucket needs of Redis: one number, the µs since the epoch at which the
-- bucket would be full again.
--
-- KEYS[1]  the bucket
-- ARGV     what an empty bucket takes to fill, and what the tokens cost, both in µs
-- Reply    what is left, in µs of filling; below 0 where that is not enough, and nothing is taken
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local cap, cost = tonumber(ARGV[1]), tonumber(ARGV[2])
local full = math.max(tonumber(redis.call('GET', KEYS[1]) or 0), now) + cost
local left = now + cap - full
if left >= 0 then
  redis.call('SET', KEYS[1], string.format('%.0f', full), 'PX', math.ceil((full - now) / 1000))
end
return string.format('%.0f', left)
