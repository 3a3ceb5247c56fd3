-- claim.lua: take one step, or learn why not. A gated header that nobody decided yet is parked instead.
-- ARGV  1 step  2 owner: "process#claim", so that a claim whose answer got lost can be asked again  3 steps known to be sent (JSON list)
-- Returns {"claimed", fence, attempt, now ms, lease's end ms, what the step needs...}
--       | {"done"} | {"busy"} | {"parked"} | {"ended"} | {"unknown"} | {"no_lease"}
-- A plan or an observe needs: req, agent, in, out, started, then of the conversation: agent, compacted; then the number of log entries and the entries;
-- an observe also p, n and, for each call, c, cs, cr. A tool needs: req, c, its approved arguments or "".
local step = parse_step(ARGV[1])
local owner = ARGV[2]
confirm_sent(cjson.decode(ARGV[3]))

local lease = call('ZSCORE', 'tm:leases', process_of(owner))
if not lease then return { 'no_lease' } end
local state, conv = unpack(call('HMGET', step.key, 'state', 'conv'))
if not state then settle_delivery(step) return { 'unknown' } end
if has_ended(state) then settle_delivery(step) return { 'ended' } end
local record = read_step(step.key, step.field)
if not record then settle_delivery(step) return { 'unknown' } end
if record.state == 'done' then settle_delivery(step) return { 'done' } end
if record.state == 'gated' or record.state == 'parked' then
  settle_delivery(step)
  if record.state == 'gated' then write_step(step.key, step.field, 'parked', record.fence, '', record.attempt) end
  return { 'parked' }
end
local mine = record.state == 'running' and record.owner == owner
if record.state ~= 'ready' and not mine then settle_delivery(step) return { 'busy' } end

local fence, attempt = record.fence, record.attempt
if not mine then fence, attempt = claim_step(step, record, owner) end
local answer = { 'claimed', text(fence), text(attempt), text(NOW_MS), lease }
local function add(values) for _, value in ipairs(values) do answer[#answer + 1] = value end end
local function fields(...) local got = call('HMGET', step.key, ...) for i = 1, select('#', ...) do answer[#answer + 1] = got[i] or '' end end

if step.kind == 'tool' then
  local place = step.round .. ':' .. step.index
  call('HSET', step.key, 'cs:' .. place, 'running', 'cb:' .. place, text(NOW_MS))
  fields('req', 'c:' .. place, 'ok:' .. place)
  return answer
end
fields('req', 'agent', 'in', 'out', 'started')
local ck = conv_key(step.tenant, conv)
local kept = call('HMGET', ck, 'agent', 'compacted')
add({ kept[1] or '', kept[2] or '' })
local log = call('LRANGE', ck .. ':log', 0, -1)
add({ text(#log) })
add(log)
if step.kind == 'observe' then
  local round = step.round
  fields('p:' .. round, 'n:' .. round)
  for i = 0, tonumber(call('HGET', step.key, 'n:' .. round)) - 1 do
    local place = round .. ':' .. text(i)
    fields('c:' .. place, 'cs:' .. place, 'cr:' .. place)
  end
end
return answer
