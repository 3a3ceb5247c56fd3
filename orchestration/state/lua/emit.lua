-- emit.lua: frames of a step under way; a step that was passed on says nothing any more.
-- ARGV  1 step  2 owner  3 fence  4 frames (JSON list)  5 which emission of this claim it is, so that one whose answer got lost can be asked again
-- Returns {"ok"} | {"fenced"} | {"ended"}
local step = parse_step(ARGV[1])
local state, conv = fetch(step.key, 'state', 'conv', 'seq0', 'up', step.field, 'e:' .. step.field)
if not state or has_ended(state) then
  release(step, ARGV[2])
  return { 'ended' }
end
local record = read_step(step.key, step.field)
if not record or record.state ~= 'running' or record.owner ~= ARGV[2] or record.fence ~= tonumber(ARGV[3]) then
  let_go(step, record, ARGV[2])
  return { 'fenced' }
end
-- deposed, but not passed on yet: whoever passes it on must find it among the steps of its process
if not call('ZSCORE', 'tm:leases', process_of(ARGV[2])) then return { 'fenced' } end
local said = ARGV[3] .. '|' .. ARGV[5]
if get(step.key, 'e:' .. step.field) ~= said then
  put(step.key, 'e:' .. step.field, said)
  emit(step.tenant, step.turn, conv, cjson.decode(ARGV[4]))
end
return { 'ok' }
