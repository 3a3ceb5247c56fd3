-- model_give.lua: a call of a limited model has ended. Its place is kept for whoever has waited longest and is ready to come.
-- ARGV  1 name  2 owner  3 step  4 calls at once (0 for any number)  5 tokens used beyond those estimated      Returns the steps to be woken
local base, member, at_once = 'tm:model:' .. ARGV[1] .. ':', ARGV[2] .. '|' .. ARGV[3], tonumber(ARGV[4])
if call('ZREM', base .. 'held', member) == 1 and ARGV[5] ~= '0' then
  call('HINCRBY', base .. 'tokens', text(math.floor(NOW_MS / 1000)), ARGV[5])
  call('EXPIRE', base .. 'tokens', 120)
end
if at_once == 0 then return {} end
call('ZREMRANGEBYSCORE', base .. 'kept', '-inf', text(NOW_MS))
local free, woken = at_once - call('ZCARD', base .. 'held') - call('ZCARD', base .. 'kept'), {}
for _, name in ipairs(call('ZRANGE', base .. 'waiting', 0, 99)) do
  if #woken >= free then break end
  local step = parse_step(name)
  local state, record = get(step.key, 'state'), read_step(step.key, step.field)
  if not state or has_ended(state) or not record or record.state == 'done' then
    call('ZREM', base .. 'waiting', name)
  elseif record.state == 'later' then
    call('ZREM', base .. 'waiting', name)
    call('ZADD', base .. 'kept', text(NOW_MS + 10000), name)
    woken[#woken + 1] = name
  end
end
return woken
