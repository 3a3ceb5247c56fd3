-- compact.lua: keep the shorter view of a conversation that a plan under way has made; a step that was passed on keeps none.
-- ARGV  1 step  2 owner  3 fence  4 view (JSON)  5 frames (JSON list)  6 what making it used (JSON; spend of commit.lua)
-- Returns {"ok"} | {"fenced"} | {"ended"}
local step = parse_step(ARGV[1])
local state, conv = fetch(step.key, 'state', 'conv', step.field)
if not state or has_ended(state) then return { 'ended' } end
local record = read_step(step.key, step.field)
if not record or record.state ~= 'running' or record.owner ~= ARGV[2] or record.fence ~= tonumber(ARGV[3])
  or not call('ZSCORE', 'tm:leases', process_of(ARGV[2])) then return { 'fenced' } end
local ck = conv_key(step.tenant, conv)
if get(ck, 'compacted') ~= ARGV[4] then
  put(ck, 'compacted', ARGV[4])
  spend(step.tenant, step.turn, conv, cjson.decode(ARGV[6]))
  emit(step.tenant, step.turn, conv, cjson.decode(ARGV[5]))
end
return { 'ok' }
