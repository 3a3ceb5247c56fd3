-- begin_passing.lua: begin a conversation that is not kept, with the entries that somebody brings along.
-- ARGV  1 tenant  2 conversation  3 seconds for which it is kept  4... entries (JSON)      Returns 1, or 0 when it had begun
local ck = conv_key(ARGV[1], ARGV[2])
if call('EXISTS', ck) == 1 then return 0 end
call('HSET', ck, 'kept_s', ARGV[3])
call('EXPIRE', ck, ARGV[3])
for i = 4, #ARGV do call('RPUSH', ck .. ':log', stamped(ARGV[i])) end
if #ARGV > 3 then call('EXPIRE', ck .. ':log', ARGV[3]) end
return 1
