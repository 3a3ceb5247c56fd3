-- resume.lua: the decision task's work: a parked header whose approval is settled may be sent again. Safe to run any number of times.
-- ARGV  1 the decide step  2 steps known to be sent (JSON list)      Returns {"send", header, its round's chord (JSON) or "", the turn's trace or ""} | {"nothing"}
local step = parse_step(ARGV[1])
confirm_sent(cjson.decode(ARGV[2]))
settle_delivery(step)
local field, place = 's:' .. step.round .. ':tool:' .. step.index, step.round .. ':' .. step.index
local state, _, _, _, chord, trace = fetch(step.key, 'state', field, 'ok:' .. place, 'kid:' .. place, 'h:' .. step.round, 'trace')
if not state or has_ended(state) then return { 'nothing' } end
local header = step.tenant .. '/' .. step.turn .. '/' .. step.round .. '/tool/' .. step.index
local record = read_step(step.key, field)
if not record then return { 'nothing' } end
local send = { 'send', header, chord or '', trace or '' }
if record.state == 'parked' and get(step.key, 'ok:' .. place) and not get(step.key, 'kid:' .. place) then
  write_step(step.key, field, 'ready', record.fence, '', record.attempt)
  offer(header, {})
  return send
end
-- refused: the header runs nothing, but its message completes the chord
if record.state == 'done' then return send end
return { 'nothing' }
