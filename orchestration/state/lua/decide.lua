-- decide.lua: record one change of an approval and what follows for its call. First one wins: `version` must still hold.
-- ARGV  1 tenant  2 approval  3 the change (JSON):
--   version   the version that it was decided on       change   its name, so that one whose answer got lost can be asked again
--   when      "open": only while its time is not up | "due": only once it is | "remind": only once its reminder is due | "": whenever
--   state     where it stands afterwards                set      {field: text}          audit  [JSON text]
--   frames    [text]      tell  [deliveries]            decision the new entry of its decisions (JSON text), without its time
--   times     {expires_at, remind_at} ("" for none)     when it is pending anew
--   verdict, result    when its call is decided: approved with the arguments that are to run, or how it ended with what the model reads (JSON texts)
--   ring      {step: [queue, message]}, what this script can send itself
--   instead   when others are asked: their approval as ask_human takes it            call     the call as it is recorded from then on (JSON text)
-- Returns {"ok", sends...} | {"stale"} | {"ended"} | {"expired"} | {"not_due"}
local tenant, id = ARGV[1], ARGV[2]
local ak, name = approval_key(tenant, id), tenant .. '/' .. id
local c = cjson.decode(ARGV[3])
local state, version, turn, round, index, agent, expires_at, last = fetch(ak, 'state', 'v', 'turn_id', 'round', 'index', 'agent', 'expires_at', 'last')
if not state then return { 'stale' } end
if last == c.change then return { 'ok' } end -- what it sent is in the outbox
if version ~= c.version then return { 'stale' } end
local key = turn_key(tenant, turn)
local turn_state, conv = fetch(key, 'state', 'conv')
if not turn_state or has_ended(turn_state) or orphaned(tenant, turn) then return { 'ended' } end
local overdue = state == 'pending' and expires_at ~= '0' and NOW_MS >= tonumber(expires_at)
if c.when == 'open' and overdue then return { 'expired' } end
if c.when == 'due' and not overdue then return { 'not_due' } end
if c.when == 'remind' then
  local at = call('ZSCORE', 'tm:due', 'remind:' .. name)
  if state ~= 'pending' or not at or tonumber(at) > NOW_MS then return { 'not_due' } end
  call('ZREM', 'tm:due', 'remind:' .. name)
end

RING = c.ring or RING
bump(ak, 'v', 1)
put(ak, 'last', c.change)
for field, value in pairs(c.set) do put(ak, field, value) end
if c.decision then
  local entry, before = '{"at":' .. text(NOW_MS) .. ',' .. string.sub(c.decision, 2), get(ak, 'decisions')
  put(ak, 'decisions', before and (string.sub(before, 1, -2) .. ',' .. entry .. ']') or ('[' .. entry .. ']'))
end
if c.state == 'held' or c.state == 'pending' then
  if c.state ~= state then
    put(ak, 'state', c.state)
    index_approval(tenant, id, agent, state, c.state)
    local times = c.times or {}
    expire_approval(tenant, id, times.expires_at, times.remind_at)
  end
else
  end_approval(tenant, id, state, c.state)
end
for _, entry in ipairs(c.audit) do audit(tenant, id, entry) end
for _, delivery in ipairs(c.tell) do tell(tenant, delivery) end

local sends, frames, place = {}, c.frames, round .. ':' .. index
if c.call then
  if get(key, 'le:' .. round) then call('HDEL', key, unpack(entry_fields(key, round))) end -- they tell of the call as it was
  put(key, 'c:' .. place, c.call)
end
if c.instead then
  bump(key, 'v', 1)
  ask_human(tenant, turn, c.instead)
end
if c.verdict then
  local field = 's:' .. round .. ':tool:' .. index
  local record = read_step(key, field)
  bump(key, 'v', 1)
  bump(key, 'wait:' .. round, -1)
  if c.verdict == 'approved' then
    put(key, 'ok:' .. place, c.result, 'cs:' .. place, 'requested')
    -- a parked header is made ready by the decision task, one that never came by this
    if record.state == 'gated' then write_step(key, field, 'ready', record.fence, '', record.attempt) end
  else
    put(key, 'cs:' .. place, c.verdict, 'cr:' .. place, c.result, 'ce:' .. place, text(NOW_MS))
    write_step(key, field, 'done', record.fence, '', record.attempt)
    bump(key, 'left:' .. round, -1)
  end
  if record.state == 'parked' then offer(tenant .. '/' .. turn .. '/' .. round .. '/decide/' .. index, sends) end
  after_call(tenant, turn, conv, round, sends, frames)
end
emit(tenant, turn, conv, frames)
return { 'ok', unpack(sends) }
