-- outbound_end.lua: how one attempt of a delivery ended. First one wins: an attempt that was taken for lost changes nothing.
-- ARGV  1 tenant  2 delivery  3 claim  4 "done" | "given_up" | "again" | "put_off": was not made at all  5 code of what went wrong, or ""
--       6 ms until the next attempt      Returns 1, or 0 when it was taken for lost
local entry, key = 'out:' .. ARGV[1] .. '/' .. ARGV[2], 'tm:' .. ARGV[1] .. ':out:' .. ARGV[2]
local state, attempt, claim = unpack(call('HMGET', key, 'state', 'attempt', 'claim'))
if state ~= 'running' or claim ~= ARGV[3] then return 0 end
local again = ARGV[4] == 'again' or ARGV[4] == 'put_off'
call('HSET', key, 'state', again and 'due' or ARGV[4], 'code', ARGV[5])
if ARGV[4] == 'put_off' then call('HSET', key, 'attempt', text(tonumber(attempt) - 1)) end
if again then call('ZADD', 'tm:due', text(NOW_MS + tonumber(ARGV[6])), entry) else call('ZREM', 'tm:due', entry) end
return 1
