-- due.lua: take handled entries out of what is due, or put them off; one that has another time by now than was seen is left alone.
-- ARGV  1 ms until they are due again, or ""  then for each: entry, its time as it was seen (ms)      Returns how many were not left alone
local count = 0
for i = 2, #ARGV, 2 do
  local at = call('ZSCORE', 'tm:due', ARGV[i])
  if at and tonumber(at) == tonumber(ARGV[i + 1]) then
    count = count + 1
    if ARGV[1] == '' then call('ZREM', 'tm:due', ARGV[i]) else call('ZADD', 'tm:due', text(NOW_MS + tonumber(ARGV[1])), ARGV[i]) end
  end
end
return count
