-- resume.lua: the decision task's work: a parked header whose approval is settled may be sent again. Safe to run any number of times.
-- ARGV  1 the decide step  2 steps known to be sent (JSON list)      Returns {"send", header} | {"nothing"}
local step = parse_step(ARGV[1])
confirm_sent(cjson.decode(ARGV[2]))
settle_delivery(step)
local state = get(step.key, 'state')
if not state or has_ended(state) then return { 'nothing' } end
local header = step.tenant .. '/' .. step.turn .. '/' .. step.round .. '/tool/' .. step.index
local field = 's:' .. step.round .. ':tool:' .. step.index
local record = read_step(step.key, field)
if not record then return { 'nothing' } end
local place = step.round .. ':' .. step.index
if record.state == 'parked' and get(step.key, 'ok:' .. place) and not get(step.key, 'kid:' .. place) then
  write_step(step.key, field, 'ready', record.fence, '', record.attempt)
  offer(header, {})
  return { 'send', header }
end
-- refused: the header runs nothing, but its message completes the chord
if record.state == 'done' then return { 'send', header } end
return { 'nothing' }
