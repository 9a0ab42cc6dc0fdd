-- A minimal token bucket. Its state is one number: the time at which the bucket is full again, in
-- µs since the epoch.
--
-- KEYS[1]  bucket
-- ARGV     time to fill an empty bucket, and time to fill the requested tokens, both in µs
-- Reply    remaining tokens as fill time in µs; if negative, nothing was taken
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local cap, cost = tonumber(ARGV[1]), tonumber(ARGV[2])
local full = math.max(tonumber(redis.call('GET', KEYS[1]) or 0), now) + cost
local left = now + cap - full
if left >= 0 then
  redis.call('SET', KEYS[1], string.format('%.0f', full), 'PX', math.ceil((full - now) / 1000))
end
return string.format('%.0f', left)
