-- forget.lua: delete a conversation that no turn uses, with its turns.
-- ARGV  1 tenant  2 conversation      Returns 1, or 0 when a turn of it runs
local ck = conv_key(ARGV[1], ARGV[2])
if call('HEXISTS', ck, 'running') == 1 then return 0 end
local turns = {}
for _, entry in ipairs(call('LRANGE', ck .. ':log', 0, -1)) do
  local turn = string.match(entry, '"turn_id":"([A-Za-z0-9_-]+)"')
  if turn then turns[turn] = true end
end
for turn in pairs(turns) do call('UNLINK', turn_key(ARGV[1], turn)) end
call('UNLINK', ck, ck .. ':log', ck .. ':mail', ck .. ':frames')
return 1
