-- outbound_send.lua: which attempt of a delivery is to be sent to the queue now. It becomes due again after a while, in case that the message, or
-- whoever makes the attempt, gets lost; an attempt that was begun and never ended is counted. One that is under way is left alone while whoever
-- makes it has its lease, and time.
-- ARGV  1 tenant  2 delivery  3 ms until it is looked at again  4 the same for one that is under way
-- Returns {attempt, for how long its first message has been on its way (ms); 0 for the first} | {} when there is nothing to do now
local entry, key = 'out:' .. ARGV[1] .. '/' .. ARGV[2], 'tm:' .. ARGV[1] .. ':out:' .. ARGV[2]
local state, attempt = unpack(call('HMGET', key, 'state', 'attempt'))
if state ~= 'due' and state ~= 'sent' and state ~= 'running' then
  call('ZREM', 'tm:due', entry)
  return {}
end
local at = call('ZSCORE', 'tm:due', entry)
if at and tonumber(at) > NOW_MS then return {} end
if state == 'running' then
  local process, ends = unpack(call('HMGET', key, 'process', 'until'))
  if NOW_MS < tonumber(ends or '0') and (process == '' or call('ZSCORE', 'tm:leases', process)) then
    call('ZADD', 'tm:due', text(math.min(NOW_MS + tonumber(ARGV[4]), tonumber(ends))), entry)
    return {}
  end
end
local waited = 0
if state == 'sent' then
  waited = NOW_MS - tonumber(call('HGET', key, 'sent_at') or '0')
else
  attempt = text(tonumber(attempt) + 1)
  call('HSET', key, 'state', 'sent', 'attempt', attempt, 'sent_at', text(NOW_MS))
end
call('ZADD', 'tm:due', text(NOW_MS + tonumber(ARGV[3])), entry)
return { attempt, text(waited) }
