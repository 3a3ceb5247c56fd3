-- rate.lua: take requests out of a principal's token bucket. What is kept is the time at which the bucket will be full again.
-- Key   tm:{tenant}:rate:{who}:{interval}:{size}, a string (microseconds) that expires when the bucket is full; other settings, another bucket
-- ARGV  1 tenant  2 who  3 microseconds for one request to flow in  4 size of the bucket  5 requests taken
-- Returns {1 taken | 0 not, left in the bucket, microseconds until it is full, microseconds until as many could be taken}
local key = 'tm:' .. ARGV[1] .. ':rate:' .. ARGV[2] .. ':' .. ARGV[3] .. ':' .. ARGV[4]
local interval, size, count = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local full = math.max(tonumber(call('GET', key) or '0'), NOW_US)
local after = full + count * interval
if after - NOW_US > size * interval then
  return { 0, math.floor(size - (full - NOW_US) / interval), full - NOW_US, after - NOW_US - size * interval }
end
call('SET', key, text(after), 'PX', math.ceil((after - NOW_US) / 1000))
return { 1, math.floor(size - (after - NOW_US) / interval), after - NOW_US, 0 }
