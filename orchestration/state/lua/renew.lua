-- renew.lua: renew the lease of a process, and with it those of all its running steps.
-- ARGV  1 process  2 lease in ms  3 "register" or "renew"  4 steps known to be sent (JSON list)
-- Returns the lease's end in ms, or "" when the process has been deposed.
confirm_sent(cjson.decode(ARGV[4]))
if ARGV[3] == 'renew' and not call('ZSCORE', 'tm:leases', ARGV[1]) then return '' end
local ends = text(NOW_MS + tonumber(ARGV[2]))
call('ZADD', 'tm:leases', ends, ARGV[1])
return ends
