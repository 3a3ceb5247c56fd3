-- depose.lua: take the lease of a process that did not renew it; from now on it commits nothing. Its steps are passed on by reclaim.lua.
-- ARGV  1 process  2 the end of the lease as it was seen (ms)      Returns 1, or 0 when it was renewed or is gone
local ends = call('ZSCORE', 'tm:leases', ARGV[1])
if not ends or ends ~= ARGV[2] then return 0 end
call('ZREM', 'tm:leases', ARGV[1])
if call('EXISTS', 'tm:run:' .. ARGV[1]) == 1 then call('SADD', 'tm:deposed', ARGV[1]) end
return 1
