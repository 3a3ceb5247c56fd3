-- forget.lua: delete a conversation that no turn uses, with its turns and the conversations of the agents that they asked.
-- ARGV  1 tenant  2 conversation      Returns 1, or 0 when a turn of it runs
local tenant = ARGV[1]
if call('HEXISTS', conv_key(tenant, ARGV[2]), 'running') == 1 then return 0 end
local function forget(conv)
  local ck, turns = conv_key(tenant, conv), {}
  for _, entry in ipairs(call('LRANGE', ck .. ':log', 0, -1)) do
    local turn = string.match(entry, '"turn_id":"([A-Za-z0-9_-]+)"')
    if turn then turns[turn] = true end
  end
  for turn in pairs(turns) do
    for child in string.gmatch(get(turn_key(tenant, turn), 'kids') or '', '%S+') do
      local nested = get(turn_key(tenant, child), 'conv')
      if nested and nested ~= conv then forget(nested) end
    end
    call('UNLINK', turn_key(tenant, turn), turn_key(tenant, turn) .. ':token')
  end
  call('UNLINK', ck, ck .. ':log', ck .. ':mail', ck .. ':frames')
end
forget(ARGV[2])
return 1
