-- model_take.lua: a place for one call of a limited model, or when to ask for it again. Asked again by the same claim, it is the same place.
-- Keys (name: the limits' name)
--   tm:model:{name}:held      zset: "owner|step" of calls under way, by the time they began (ms)
--   tm:model:{name}:kept      zset: steps for which a place is kept, by the end of that (ms)
--   tm:model:{name}:waiting   zset: steps that wait for a place, by the time they first asked (us)
--   tm:model:{name}:begun     zset: calls of the last minute, and those that steps wait to begin ("step"), by when they begin (us)
--   tm:model:{name}:tokens    hash: second -> tokens used in it
-- ARGV  1 name  2 owner  3 step  4 calls at once  5 calls a minute  6 tokens a minute (0 each for any number)  7 estimated tokens
-- Returns {"taken"} | {"wait", ms}
local MINUTE_US = 60000000
local base, owner, step = 'tm:model:' .. ARGV[1] .. ':', ARGV[2], ARGV[3]
local at_once, calls, tokens, estimate = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local member = owner .. '|' .. step
if call('ZSCORE', base .. 'held', member) then return { 'taken' } end

-- a call whose step has ended, or whose process is gone, holds nothing any more
local function free_places()
  call('ZREMRANGEBYSCORE', base .. 'kept', '-inf', text(NOW_MS))
  local free = at_once - call('ZCARD', base .. 'held') - call('ZCARD', base .. 'kept') + (call('ZSCORE', base .. 'kept', step) and 1 or 0)
  if free > 0 then return free end
  for _, holder in ipairs(call('ZRANGE', base .. 'held', 0, -1)) do
    local process, held_step = string.match(holder, '^([^#|]+)[^|]*|(.+)$')
    if not call('ZSCORE', 'tm:leases', process) or call('SISMEMBER', 'tm:run:' .. process, held_step) == 0 then
      call('ZREM', base .. 'held', holder)
      free = free + 1
    end
  end
  return free
end
if at_once > 0 and free_places() <= 0 then
  call('ZADD', base .. 'waiting', 'NX', text(NOW_US), step)
  call('EXPIRE', base .. 'waiting', 3600)
  -- whoever gives a place back rings; this is for the case that it dies
  return { 'wait', text(5000 + math.min(call('ZRANK', base .. 'waiting', step), 1000) * 50) }
end

if tokens > 0 then
  local used, oldest = 0, {}
  local buckets = call('HGETALL', base .. 'tokens')
  for i = 1, #buckets, 2 do
    local age_ms = NOW_MS - tonumber(buckets[i]) * 1000
    if age_ms >= 60000 then
      call('HDEL', base .. 'tokens', buckets[i])
    else
      used = used + tonumber(buckets[i + 1])
      oldest[#oldest + 1] = { tonumber(buckets[i]), tonumber(buckets[i + 1]) }
    end
  end
  if used > 0 and used + estimate > tokens then
    table.sort(oldest, function(a, b) return a[1] < b[1] end)
    local over, wait_ms = used + estimate - tokens, 60000
    for _, bucket in ipairs(oldest) do
      over = over - bucket[2]
      wait_ms = bucket[1] * 1000 + 60000 - NOW_MS
      if over <= 0 then break end
    end
    return { 'wait', text(math.max(wait_ms, 50)) }
  end
end

if calls > 0 then
  local begun = base .. 'begun'
  call('ZREMRANGEBYSCORE', begun, '-inf', text(NOW_US - MINUTE_US))
  local planned = call('ZSCORE', begun, step)
  if planned and tonumber(planned) > NOW_US then return { 'wait', text(math.ceil((tonumber(planned) - NOW_US) / 1000)) } end
  if planned then call('ZREM', begun, step) end
  local all = call('ZCARD', begun)
  -- one whose time has come is stopped by calls alone, a newcomer by those too that others wait to begin
  local count = planned and call('ZCOUNT', begun, '-inf', text(NOW_US)) or all
  if count >= calls then
    -- a minute after the call that is the last to leave it room
    local place = text(all - calls)
    local before = call('ZRANGE', begun, place, place, 'WITHSCORES')
    local at = math.max(tonumber(before[2]) + MINUTE_US, NOW_US)
    call('ZADD', begun, text(at), step)
    call('PEXPIRE', begun, text(math.ceil((at - NOW_US) / 1000) + 120000))
    return { 'wait', text(math.ceil((at - NOW_US) / 1000)) }
  end
  call('ZADD', begun, text(NOW_US), text(NOW_US) .. '|' .. member)
  call('PEXPIRE', begun, text(120000 + math.max(call('PTTL', begun), 0)))
end
call('ZADD', base .. 'held', text(NOW_MS), member)
call('ZREM', base .. 'waiting', step)
call('ZREM', base .. 'kept', step)
if tokens > 0 then
  call('HINCRBY', base .. 'tokens', text(math.floor(NOW_MS / 1000)), text(estimate))
  call('EXPIRE', base .. 'tokens', 120)
end
return { 'taken' }
