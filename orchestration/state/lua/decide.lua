-- decide.lua: record a decision about one approval and what follows for its call. First one wins: `version` must still hold.
-- ARGV  1 tenant  2 approval  3 JSON: version, set {field: text}, frames [text], and when it settles: verdict (approved | denied | expired | cancelled),
--       arguments (JSON text of what is to run) or result (JSON text of what the model reads)
-- Returns {"ok", sends...} | {"stale"} | {"ended"}
local tenant, id = ARGV[1], ARGV[2]
local ak = approval_key(tenant, id)
local c = cjson.decode(ARGV[3])
local state, version, turn, round, index = unpack(call('HMGET', ak, 'state', 'v', 'turn_id', 'round', 'index'))
if not state or version ~= c.version then return { 'stale' } end
local key = turn_key(tenant, turn)
local turn_state, conv = unpack(call('HMGET', key, 'state', 'conv'))
if not turn_state or has_ended(turn_state) then return { 'ended' } end

call('HINCRBY', ak, 'v', 1)
for field, value in pairs(c.set) do call('HSET', ak, field, value) end
local sends, frames = {}, c.frames
if c.verdict then
  local place = round .. ':' .. index
  local field = 's:' .. round .. ':tool:' .. index
  local record = read_step(key, field)
  call('HSET', ak, 'decided_at', text(NOW_MS))
  call('ZREM', 'tm:' .. tenant .. ':ap:pending', id)
  call('ZREM', 'tm:due', 'expire:' .. tenant .. '/' .. id)
  call('EXPIRE', ak, APPROVAL_KEPT_S)
  call('HINCRBY', key, 'v', 1)
  call('HINCRBY', key, 'wait:' .. round, -1)
  if c.verdict == 'approved' then
    call('HSET', key, 'ok:' .. place, c.arguments, 'cs:' .. place, 'requested')
    -- a parked header is made ready by the decision task, one that never came by this
    if record.state == 'gated' then write_step(key, field, 'ready', record.fence, '', record.attempt) end
  else
    call('HSET', key, 'cs:' .. place, c.verdict, 'cr:' .. place, c.result, 'ce:' .. place, text(NOW_MS))
    write_step(key, field, 'done', record.fence, '', record.attempt)
    call('HINCRBY', key, 'left:' .. round, -1)
  end
  if record.state == 'parked' then offer(tenant .. '/' .. turn .. '/' .. round .. '/decide/' .. index, sends) end
  after_call(tenant, turn, conv, round, sends, frames)
end
emit(tenant, turn, conv, frames)
return { 'ok', unpack(sends) }
