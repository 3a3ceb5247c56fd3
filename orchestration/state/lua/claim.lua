-- claim.lua: take one step, or learn why not. A gated header that nobody decided yet is parked instead, and one that others come before waits.
-- ARGV  1 step  2 owner: "process#claim", so that a claim whose answer got lost can be asked again  3 steps known to be sent (JSON list)
-- Returns {"claimed", fence, attempt, now ms, lease's end ms, what the step needs...}
--       | {"observed", the same of the next plan...}: the observe was done at once, and the next plan is claimed in its place
--       | {"done"} | {"busy"} | {"parked"} | {"ended"} | {"unknown"} | {"no_lease"}
-- A plan or an observe needs: req, agent, active, in, out, cost, tools, then of the conversation: active, active_from, compacted, last_in, asked, in, out,
-- cost, tools; then the number of log entries and the entries; an observe also p, n and, for each call, c, cs, cr. A tool needs: req, c, its approved arguments or "".
local step = parse_step(ARGV[1])
local owner = ARGV[2]
confirm_sent(cjson.decode(ARGV[3]))

local lease = call('ZSCORE', 'tm:leases', process_of(owner))
if not lease then return { 'no_lease' } end
local place = step.round .. ':' .. step.index
local wanted = step.kind == 'tool' and { 'req', 'c:' .. place, 'ok:' .. place, 'maybe:' .. place, 'v', 'seq:' .. step.round, 'parent' }
  or { 'req', 'agent', 'active', 'in', 'out', 'cost', 'tools', 'parent' }
if step.kind == 'observe' then
  for _, name in ipairs({ 'p:', 'n:', 'le:' }) do wanted[#wanted + 1] = name .. step.round end
  wanted[#wanted + 1] = 'steered'
  wanted[#wanted + 1] = 'v'
end
local state, conv = fetch(step.key, 'state', 'conv', step.field, unpack(wanted))
if not state then settle_delivery(step) return { 'unknown' } end
if has_ended(state) or orphaned(step.tenant, step.turn) then settle_delivery(step) return { 'ended' } end
local record = read_step(step.key, step.field)
if not record then settle_delivery(step) return { 'unknown' } end
local ck = conv_key(step.tenant, conv)
local observed = step.kind == 'observe' and (record.state == 'ready' or record.state == 'done') and close_round(step, record, owner, ck)
if record.state == 'done' and not observed then settle_delivery(step) return { 'done' } end
if record.state == 'gated' or record.state == 'parked' then
  settle_delivery(step)
  if record.state == 'gated' then write_step(step.key, step.field, 'parked', record.fence, '', record.attempt) end
  return { 'parked' }
end
if step.kind == 'tool' and record.state == 'ready' and get(step.key, 'seq:' .. step.round) and not its_turn(step.key, step.round, step.index) then
  settle_delivery(step)
  return { 'parked' }
end
local mine = record.state == 'running' and record.owner == owner
if record.state ~= 'ready' and not mine and not observed then settle_delivery(step) return { 'busy' } end

local fence, attempt = record.fence, record.attempt
if observed then fence, attempt = 1, 1 elseif not mine then fence, attempt = claim_step(step, record, owner) end
local answer = { observed and 'observed' or 'claimed', text(fence), text(attempt), text(NOW_MS), lease }
local function add(values) for _, value in ipairs(values) do answer[#answer + 1] = value end end
local function fields(...) for _, name in ipairs({ ... }) do answer[#answer + 1] = get(step.key, name) or '' end end

if step.kind == 'tool' then
  -- from here on the call may run: whoever decided otherwise about it before must look again
  if not mine then bump(step.key, 'v', 1) end
  put(step.key, 'cs:' .. place, 'running', 'cb:' .. place, text(NOW_MS))
  fields('req', 'c:' .. place, 'ok:' .. place, 'maybe:' .. place)
  return answer
end
fields('req', 'agent', 'active', 'in', 'out', 'cost', 'tools')
local kept = { 'active', 'active_from', 'compacted', 'last_in', 'asked', 'in', 'out', 'cost', 'tools' }
fetch(ck, unpack(kept))
for _, name in ipairs(kept) do answer[#answer + 1] = get(ck, name) or '' end
local log = call('LRANGE', ck .. ':log', 0, -1)
add({ text(#log) })
add(log)
if step.kind == 'observe' and not observed then
  local round, names = step.round, {}
  local count = tonumber(get(step.key, 'n:' .. round))
  for i = 0, count - 1 do
    for _, part in ipairs({ 'c:', 'cs:', 'cr:' }) do names[#names + 1] = part .. round .. ':' .. text(i) end
  end
  if count > 0 then fetch(step.key, unpack(names)) end
  fields('p:' .. round, 'n:' .. round)
  fields(unpack(names))
end
return answer
