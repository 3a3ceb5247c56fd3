-- outbound_send.lua: which attempt of a delivery is to be sent to the queue now. It becomes due again after a while, in case that the message, or
-- whoever makes the attempt, gets lost; an attempt that was begun and never ended is counted.
-- ARGV  1 tenant  2 delivery  3 ms until it is looked at again      Returns {attempt} | {} when there is nothing left to do
local entry, key = 'out:' .. ARGV[1] .. '/' .. ARGV[2], 'tm:' .. ARGV[1] .. ':out:' .. ARGV[2]
local state, attempt = unpack(call('HMGET', key, 'state', 'attempt'))
if state ~= 'due' and state ~= 'sent' and state ~= 'running' then
  call('ZREM', 'tm:due', entry)
  return {}
end
local at = call('ZSCORE', 'tm:due', entry)
if at and tonumber(at) > NOW_MS then return {} end
if state ~= 'sent' then
  attempt = text(tonumber(attempt) + 1)
  call('HSET', key, 'state', 'sent', 'attempt', attempt)
end
call('ZADD', 'tm:due', text(NOW_MS + tonumber(ARGV[3])), entry)
return { attempt }
