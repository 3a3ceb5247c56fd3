-- audit.lua: one entry of the audit stream that comes with no other change.
-- ARGV  1 tenant  2 approval  3 entry (JSON)  4 its name, so that one whose answer got lost can be asked again      Returns 1
local ak = approval_key(ARGV[1], ARGV[2])
if get(ak, 'noted') == ARGV[4] then return 1 end
put(ak, 'noted', ARGV[4])
audit(ARGV[1], ARGV[2], ARGV[3])
return 1
