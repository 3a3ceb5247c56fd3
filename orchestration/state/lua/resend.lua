-- resend.lua: steps that were sent but lost go back to the outbox; those claimed in the meantime are left alone.
-- ARGV  steps      Returns the steps to be sent
local sends = {}
for _, name in ipairs(ARGV) do
  if call('ZREM', 'tm:sent:' .. queue_of(parse_step(name).kind), name) == 1 then offer(name, sends) end
end
return sends
