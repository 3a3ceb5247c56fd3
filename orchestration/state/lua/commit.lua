-- commit.lua: record what a step did and all that follows from it, at once. First write wins: a step that was passed on commits nothing.
-- ARGV  1 tenant  2 turn  3 what is committed (JSON)  4 steps known to be sent (JSON list)
--   step, owner, fence   the claimed step that commits; or version: the version of the turn that the change was decided on
--   set      {field: text}                    frames  [text]       log  [text]        conv_set  {field: text}, of the conversation
--   round, calls  [{c, state, step, result?, approval?}]    opens a round; step is ready, gated or done; an approval as ask_human takes it;
--            with claim or fin it is closed at once
--   asked    the log entry of a round of plain tool calls, for close_round
--   sequential                                its calls run one after the other
--   result   {round, index, state, content, entry?, refused?}   how one call ended, with its log entry; refused when an approved one was not
--            asked after all
--   spend    {in, out, cost, tools, asked}    what this step used; counts for the turn, for the conversation, and for those that asked for the turn
--   room     [[turn or conversation, id, most]]   accounts above in which the tools of spend must have room
--   child    a turn that answers this step's call, as start_child takes it; the step is suspended until its end
--   retry_in_ms, uncounted?, maybe_ran?       the same step is tried again after a pause; uncounted when nothing was tried
--   unless_steered                            refuse when inputs joined meanwhile
--   claim    the next step, claimed in place by the same process
--   close    [{round, index, state, result}]  open calls of a turn that ends
--   due      the entry of tm:due that this change answers: refused unless it still is due
--   expired  the approval whose time was up, when that ends the turn
--   fin      {state, stop, answer?, output?, error?, by?, from?, tell?}    as end_turn takes it
--   change   the name of a change from outside, so that one whose answer got lost can be asked again
--   ring     {step: [queue, message]}         what this script can send itself
-- Returns {"committed", fence of the claimed step or "", number of joined inputs, joined inputs..., sends...}
--       | {"already", sends...}: the same commit was made before and its answer got lost
--       | {"fenced"} | {"ended"} | {"stale"} | {"steered"} | {"not_due"} | {"over"}
local tenant, turn = ARGV[1], ARGV[2]
local key = turn_key(tenant, turn)
local c = cjson.decode(ARGV[3])
confirm_sent(cjson.decode(ARGV[4]))

local step = c.step and parse_step(c.step)
local state, conv, version = fetch(key, 'state', 'conv', 'v', 'seq0', 'in', 'out', 'steered', 'aps', 'chords', 'up', 'parent', 'kids', step and step.field or 'v',
  c.result and 'le:' .. text(c.result.round) or 'v')
if state and c.change and get(key, 'last') == c.change then return { 'already' } end -- what it sent is in the outbox
if not state or has_ended(state) then
  if step then
    release(step, c.owner)
    local done = state and read_step(key, step.field)
    if done and done.state == 'done' and done.owner == c.owner and done.fence == c.fence then return { 'already' } end
  end
  return { 'ended' }
end
local record
if step then
  record = read_step(key, step.field)
  local mine = record and record.owner == c.owner and record.fence == c.fence
  if mine and (record.state == 'done' or (record.state == 'parked' and c.child)) then
    local again = {}
    local following = c.claim and parse_step(c.claim)
    local next_record = following and read_step(key, following.field)
    if next_record and next_record.state == 'running' and next_record.owner == c.owner then
      release(following, c.owner)
      write_step(key, following.field, 'ready', next_record.fence, '', next_record.attempt)
      offer(c.claim, again)
    end
    return { 'already', unpack(again) }
  end
  if not mine or record.state ~= 'running' then
    let_go(step, record, c.owner)
    return { 'fenced' }
  end
  -- deposed, but not passed on yet: the step stays among those of its process, or whoever passes them on would not find it
  if not call('ZSCORE', 'tm:leases', process_of(c.owner)) then return { 'fenced' } end
elseif version ~= c.version then
  return { 'stale' }
end
if c.due and tonumber(call('ZSCORE', 'tm:due', c.due) or 'inf') > NOW_MS then return { 'not_due' } end
if c.unless_steered and get(key, 'steered') then return { 'steered' } end
for _, account in ipairs(c.room or {}) do
  local above = account[1] == 'turn' and turn_key(tenant, account[2]) or conv_key(tenant, account[2])
  if tonumber(get(above, 'tools') or '0') + c.spend.tools > account[3] then return { 'over' } end
end

RING = c.ring or RING
bump(key, 'v', 1)
if c.change then put(key, 'last', c.change) end
local sends, frames = {}, c.frames or {}
if step then
  release(step, c.owner)
  if c.retry_in_ms then
    write_step(key, step.field, 'later', record.fence, '', record.attempt - (c.uncounted and 1 or 0))
    if c.maybe_ran then put(key, 'maybe:' .. step.round .. ':' .. step.index, '1') end
    call('ZADD', 'tm:due', text(NOW_MS + c.retry_in_ms), 'step:' .. step.text)
    emit(tenant, turn, conv, frames)
    return { 'committed', '', '0' }
  end
  write_step(key, step.field, c.child and 'parked' or 'done', record.fence, c.owner, record.attempt)
  if c.child then start_child(tenant, turn, step.round, step.index, c.child, sends) end
end
for field, value in pairs(c.set or {}) do put(key, field, value) end
local ck = conv_key(tenant, conv)
for field, value in pairs(c.conv_set or {}) do put(ck, field, value) end
if c.spend then
  fetch(ck, 'seq', 'in', 'out', 'cost', 'tools', 'asked')
  spend(tenant, turn, conv, c.spend)
end
if step and step.kind == 'observe' and get(key, 'le:' .. step.round) then call('HDEL', key, unpack(entry_fields(key, step.round))) end
if c.log then
  local entries = {}
  for i, entry in ipairs(c.log) do entries[i] = stamped(entry) end
  if #entries > 0 then call('RPUSH', ck .. ':log', unpack(entries)) end
end
local joined = c.claim and join_inputs(key, ck) or {}

if c.calls then
  local round, left, wait = text(c.round), 0, 0
  for i, one in ipairs(c.calls) do
    local place = round .. ':' .. text(i - 1)
    local name = tenant .. '/' .. turn .. '/' .. round .. '/tool/' .. text(i - 1)
    put(key, 'c:' .. place, one.c, 'cs:' .. place, one.state)
    if one.result then
      put(key, 'cr:' .. place, one.result, 'ce:' .. place, text(NOW_MS))
    else
      left = left + 1
      if not c.sequential or left == 1 or one.approval then offer(name, sends) end
    end
    write_step(key, 's:' .. round .. ':tool:' .. text(i - 1), one.step, 0, '', 0)
    if one.approval then
      wait = wait + 1
      ask_human(tenant, turn, one.approval)
    end
  end
  put(key, 'n:' .. round, text(#c.calls), 'left:' .. round, text(left), 'wait:' .. round, text(wait))
  if c.chord then
    put(key, 'h:' .. round, c.chord, 'chords', (get(key, 'chords') or '') .. ' ' .. round)
  end
  if c.sequential then put(key, 'seq:' .. round, '1') end
  if c.asked then put(key, 'le:' .. round, c.asked) end
  if not c.claim and not c.fin then after_call(tenant, turn, conv, round, sends, frames) end
end
if c.result then
  local place = text(c.result.round) .. ':' .. text(c.result.index)
  put(key, 'cs:' .. place, c.result.state, 'cr:' .. place, c.result.content, 'ce:' .. place, text(NOW_MS))
  if c.result.entry and get(key, 'le:' .. text(c.result.round)) then put(key, 'lr:' .. place, c.result.entry) end
  bump(key, 'left:' .. text(c.result.round), -1)
  audit_call(tenant, turn, place, c.result.state, c.result.refused)
  after_call(tenant, turn, conv, text(c.result.round), sends, frames)
end
for _, one in ipairs(c.close or {}) do
  local place = text(one.round) .. ':' .. text(one.index)
  put(key, 'cs:' .. place, one.state, 'cr:' .. place, one.result, 'ce:' .. place, text(NOW_MS))
  audit_call(tenant, turn, place, one.state, false, c.fin and c.fin.by, c.fin and c.fin.from)
end
if c.expired then close_approval(tenant, turn, c.expired, 'expired') end
emit(tenant, turn, conv, frames)

local fence = ''
if c.claim then
  claim_following(parse_step(c.claim), c.owner)
  fence = '1'
end
if c.fin then end_turn(tenant, turn, conv, c.fin, sends) end
local answer = { 'committed', fence, text(#joined) }
for _, entry in ipairs(joined) do answer[#answer + 1] = entry end
for _, name in ipairs(sends) do answer[#answer + 1] = name end
return answer
