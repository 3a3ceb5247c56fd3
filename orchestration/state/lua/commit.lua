-- commit.lua: record what a step did and all that follows from it, at once. First write wins: a step that was passed on commits nothing.
-- ARGV  1 tenant  2 turn  3 what is committed (JSON)  4 steps known to be sent (JSON list)
--   step, owner, fence   the claimed step that commits; or version: the version of the turn that the change was decided on
--   set      {field: text}                    frames  [text]       log  [text]        usage  [input tokens, output tokens]
--   round, calls  [{c, state, step, result?, approval?: {id, fields: {…}, expires_at?}}]    opens a round; step is ready, gated or done
--   result   {round, index, state, content}   how one call ended
--   retry_in_ms                               the same step is tried again after a pause
--   unless_steered                            refuse when inputs joined meanwhile
--   claim    the next step, claimed in place by the same process
--   close    [{round, index, state, result}]  open calls of a turn that ends
--   fin      {state, stop, answer?, output?, error?}
--   ring     {step: [queue, message]}         what this script can send itself
-- Returns {"committed", fence of the claimed step or "", number of joined inputs, joined inputs..., sends...}
--       | {"already", sends...}: the same commit was made before and its answer got lost
--       | {"fenced"} | {"ended"} | {"stale"} | {"steered"}
local tenant, turn = ARGV[1], ARGV[2]
local key = turn_key(tenant, turn)
local c = cjson.decode(ARGV[3])
confirm_sent(cjson.decode(ARGV[4]))

local state, conv, version = unpack(call('HMGET', key, 'state', 'conv', 'v'))
local step = c.step and parse_step(c.step)
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
  if mine and record.state == 'done' then
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
  if not mine or record.state ~= 'running' or not call('ZSCORE', 'tm:leases', process_of(c.owner)) then
    release(step, c.owner)
    return { 'fenced' }
  end
elseif version ~= c.version then
  return { 'stale' }
end
if c.unless_steered and call('EXISTS', key .. ':steer') == 1 then return { 'steered' } end

RING = c.ring or RING
call('HINCRBY', key, 'v', 1)
local sends, frames = {}, c.frames or {}
if step then
  release(step, c.owner)
  if c.retry_in_ms then
    write_step(key, step.field, 'later', record.fence, '', record.attempt)
    call('ZADD', 'tm:due', text(NOW_MS + c.retry_in_ms), 'step:' .. step.text)
    emit(tenant, turn, conv, frames)
    return { 'committed', '', '0' }
  end
  write_step(key, step.field, 'done', record.fence, c.owner, record.attempt)
end
for field, value in pairs(c.set or {}) do call('HSET', key, field, value) end
if c.usage then
  call('HINCRBY', key, 'in', c.usage[1])
  call('HINCRBY', key, 'out', c.usage[2])
end

local ck = conv_key(tenant, conv)
for _, entry in ipairs(c.log or {}) do call('RPUSH', ck .. ':log', stamped(entry)) end
local joined = {}
if c.claim then
  joined = call('LRANGE', key .. ':steer', 0, -1)
  for _, entry in ipairs(joined) do call('RPUSH', ck .. ':log', stamped(entry)) end
  call('DEL', key .. ':steer')
end

if c.calls then
  local round, left, wait = text(c.round), 0, 0
  for i, one in ipairs(c.calls) do
    local place = round .. ':' .. text(i - 1)
    local name = tenant .. '/' .. turn .. '/' .. round .. '/tool/' .. text(i - 1)
    call('HSET', key, 'c:' .. place, one.c, 'cs:' .. place, one.state)
    if one.result then
      call('HSET', key, 'cr:' .. place, one.result, 'ce:' .. place, text(NOW_MS))
    else
      left = left + 1
      offer(name, sends)
    end
    write_step(key, 's:' .. round .. ':tool:' .. text(i - 1), one.step, 0, '', 0)
    if one.approval then
      wait = wait + 1
      local ak = approval_key(tenant, one.approval.id)
      for field, value in pairs(one.approval.fields) do call('HSET', ak, field, value) end
      call('HSET', ak, 'requested_at', text(NOW_MS))
      call('ZADD', 'tm:' .. tenant .. ':ap:pending', text(NOW_MS), one.approval.id)
      if one.approval.expires_at then
        call('HSET', ak, 'expires_at', one.approval.expires_at)
        call('ZADD', 'tm:due', one.approval.expires_at, 'expire:' .. tenant .. '/' .. one.approval.id)
      end
      call('HSET', key, 'aps', (call('HGET', key, 'aps') or '') .. ' ' .. one.approval.id)
    end
  end
  call('HSET', key, 'n:' .. round, text(#c.calls), 'left:' .. round, text(left), 'wait:' .. round, text(wait))
  if c.chord then
    call('HSET', key, 'h:' .. round, c.chord, 'chords', (call('HGET', key, 'chords') or '') .. ' ' .. round)
  end
  after_call(tenant, turn, conv, round, sends, frames)
end
if c.result then
  local place = text(c.result.round) .. ':' .. text(c.result.index)
  call('HSET', key, 'cs:' .. place, c.result.state, 'cr:' .. place, c.result.content, 'ce:' .. place, text(NOW_MS))
  call('HINCRBY', key, 'left:' .. text(c.result.round), -1)
  after_call(tenant, turn, conv, text(c.result.round), sends, frames)
end
for _, one in ipairs(c.close or {}) do
  local place = text(one.round) .. ':' .. text(one.index)
  call('HSET', key, 'cs:' .. place, one.state, 'cr:' .. place, one.result, 'ce:' .. place, text(NOW_MS))
end
emit(tenant, turn, conv, frames)

local fence = ''
if c.claim then
  local following = parse_step(c.claim)
  write_step(key, following.field, 'ready', 0, '', 0)
  fence = text(claim_step(following, { fence = 0, attempt = 0 }, c.owner))
end
if c.fin then end_turn(tenant, turn, conv, c.fin, sends) end
local answer = { 'committed', fence, text(#joined) }
for _, entry in ipairs(joined) do answer[#answer + 1] = entry end
for _, name in ipairs(sends) do answer[#answer + 1] = name end
return answer
