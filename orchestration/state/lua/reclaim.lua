-- reclaim.lua: pass on one step of a deposed process: run it again, or record that nobody knows what came of it.
-- ARGV  1 step  2 process  3 "again" | "unknown"  4 result (JSON) when unknown  5 frames (JSON list)      Returns the steps to be sent
local step, process = parse_step(ARGV[1]), ARGV[2]
local sends = {}
release(step, process)
if call('EXISTS', 'tm:run:' .. process) == 0 then call('SREM', 'tm:deposed', process) end
local state, conv = fetch(step.key, 'state', 'conv')
if not state or has_ended(state) then return sends end
local record = read_step(step.key, step.field)
if not record or record.state ~= 'running' or process_of(record.owner) ~= process then return sends end
bump(step.key, 'v', 1)
local frames = cjson.decode(ARGV[5])
if ARGV[3] == 'again' then
  -- a call that is asked again stays "running" meanwhile: it may have run already, and must not read "did not run" when it is cancelled
  write_step(step.key, step.field, 'ready', record.fence, '', record.attempt)
  if step.kind == 'plan' and string.match(get(step.key, 'e:' .. step.field) or '', '^%d+') == text(record.fence) then
    frames[#frames + 1] = '{"kind":"retry","turn_id":"' .. step.turn .. '","round":' .. step.round .. '}' -- its tokens so far are void
  end
  if step.kind == 'tool' then put(step.key, 'maybe:' .. step.round .. ':' .. step.index, '1') end
  offer(step.text, sends)
else
  local place = step.round .. ':' .. step.index
  write_step(step.key, step.field, 'done', record.fence, '', record.attempt)
  put(step.key, 'cs:' .. place, 'unknown_outcome', 'cr:' .. place, ARGV[4], 'ce:' .. place, text(NOW_MS))
  bump(step.key, 'left:' .. step.round, -1)
  audit_call(step.tenant, step.turn, place, 'unknown_outcome')
  after_call(step.tenant, step.turn, conv, step.round, sends, frames)
end
emit(step.tenant, step.turn, conv, frames)
return sends
