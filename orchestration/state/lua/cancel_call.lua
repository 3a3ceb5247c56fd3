-- cancel_call.lua: end one call that waits for its step or runs; the step, if it runs, is disowned.
-- ARGV  1 tenant  2 turn  3 version  4 round  5 index  6 result (JSON)  7 state  8 frames (JSON list)
--       9 the name of this change, so that one whose answer got lost can be asked again  10 by whom  11 from where (JSON texts)
-- Returns {"ok", sends...} | {"stale"}
local tenant, turn, round, index = ARGV[1], ARGV[2], ARGV[4], ARGV[5]
local key = turn_key(tenant, turn)
local state, conv, version = fetch(key, 'state', 'conv', 'v')
if state and get(key, 'last') == ARGV[9] then return { 'ok' } end -- what it sent is in the outbox
if not state or has_ended(state) or version ~= ARGV[3] then return { 'stale' } end
local step = parse_step(tenant .. '/' .. turn .. '/' .. round .. '/tool/' .. index)
local record = read_step(key, step.field)
if record.state == 'done' then return { 'stale' } end
bump(key, 'v', 1)
put(key, 'last', ARGV[9])
if record.state == 'running' then release(step, record.owner) end
write_step(key, step.field, 'done', record.fence, '', record.attempt)
call('ZREM', 'tm:due', 'step:' .. step.text)
local place = round .. ':' .. index
put(key, 'cs:' .. place, ARGV[7], 'cr:' .. place, ARGV[6], 'ce:' .. place, text(NOW_MS))
bump(key, 'left:' .. round, -1)
local child = get(key, 'kid:' .. place)
if child then abandon(tenant, child, ARGV[10], ARGV[11]) end
if get(key, 'kw:' .. place) then
  drop(key, 'kw:' .. place)
  bump(key, 'wait:' .. round, -1)
end
audit_call(tenant, turn, place, ARGV[7], false, ARGV[10], ARGV[11])
local sends, frames = {}, cjson.decode(ARGV[8])
after_call(tenant, turn, conv, round, sends, frames)
emit(tenant, turn, conv, frames)
return { 'ok', unpack(sends) }
