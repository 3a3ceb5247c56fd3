-- promote.lua: a step whose pause is over becomes ready and is to be sent.
-- ARGV  1 step      Returns the steps to be sent
local step = parse_step(ARGV[1])
local sends = {}
call('ZREM', 'tm:due', 'step:' .. step.text)
local state = get(step.key, 'state')
local record = read_step(step.key, step.field)
if state and not has_ended(state) and record and record.state == 'later' then
  write_step(step.key, step.field, 'ready', record.fence, '', record.attempt)
  offer(step.text, sends)
end
return sends
