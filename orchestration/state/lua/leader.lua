-- leader.lua: hold or take the leadership of one duty. One whose process has lost its lease holds none.
-- ARGV  1 duty  2 who: "process" or "process#part"  3 ms for which it holds      Returns 1 for the leader, else 0
local key = 'tm:leader:' .. ARGV[1]
local holder = call('GET', key)
if holder and holder ~= ARGV[2] and call('ZSCORE', 'tm:leases', process_of(holder)) then return 0 end
call('SET', key, ARGV[2], 'PX', ARGV[3])
return 1
