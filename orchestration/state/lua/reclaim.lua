-- reclaim.lua: pass on one step of a deposed process, or one that a living process has given up: run it again, or record that nobody knows
-- what came of it.
-- ARGV  1 step  2 process, or owner ("process#claim") of what was given up  3 "again" | "unbegun": nothing was done under this claim | "unknown"
--       4 result (JSON) when unknown  5 frames (JSON list)  6 ms until it is run again      Returns the steps to be sent
local step, whose, pause_ms = parse_step(ARGV[1]), ARGV[2], tonumber(ARGV[6])
local process = process_of(whose)
local sends = {}
local state, conv = fetch(step.key, 'state', 'conv', step.field)
local record = read_step(step.key, step.field)
local theirs = record and record.state == 'running' and (record.owner == whose or process_of(record.owner) == whose)
if theirs or not state or has_ended(state) then release(step, process) else let_go(step, record, whose) end
if call('EXISTS', 'tm:run:' .. process) == 0 then call('SREM', 'tm:deposed', process) end
if not theirs or not state or has_ended(state) then return sends end
bump(step.key, 'v', 1)
local frames = cjson.decode(ARGV[5])
if ARGV[3] ~= 'unknown' then
  -- a call that is asked again stays "running" meanwhile: it may have run already, and must not read "did not run" when it is cancelled
  local unbegun = ARGV[3] == 'unbegun'
  write_step(step.key, step.field, pause_ms > 0 and 'later' or 'ready', record.fence, '', record.attempt - (unbegun and 1 or 0))
  if step.kind == 'plan' and string.match(get(step.key, 'e:' .. step.field) or '', '^%d+') == text(record.fence) then
    frames[#frames + 1] = '{"kind":"retry","turn_id":"' .. step.turn .. '","round":' .. step.round .. '}' -- its tokens so far are void
  end
  if step.kind == 'tool' and not unbegun then put(step.key, 'maybe:' .. step.round .. ':' .. step.index, '1') end
  if pause_ms > 0 then call('ZADD', 'tm:due', text(NOW_MS + pause_ms), 'step:' .. step.text) else offer(step.text, sends) end
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
