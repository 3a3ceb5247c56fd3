-- steps.lua: frames, and the way of one step: offered, sent, claimed, released, observed.

-- Frames get their numbers here: max(last + 1, now in microseconds), so that none goes back even after a restore.
local function emit(tenant, turn, conv, frames)
  if #frames == 0 then return end
  local ck, key = conv_key(tenant, conv), turn_key(tenant, turn)
  local seq = tonumber(get(ck, 'seq') or '0')
  for _, frame in ipairs(frames) do
    seq = math.max(seq + 1, NOW_US)
    local id = text(seq)
    if not get(key, 'seq0') then put(key, 'seq0', id) end
    call('XADD', ck .. ':frames', 'MAXLEN', '~', FRAMES_KEPT, id .. '-0', 't', turn, 'f', frame)
    call('PUBLISH', ck .. ':live', id .. ' ' .. turn .. ' ' .. frame)
  end
  put(ck, 'seq', text(seq))
  put(key, 'seqn', text(seq))
  if not get(key, 'up') then return end
  -- whoever watches the turn that this one runs for sees its frames inside frames of its own
  local parent = string.match(get(key, 'parent'), '^%S+')
  local pk, wrapped = turn_key(tenant, parent), {}
  if has_ended(get(pk, 'state') or 'completed') then return end
  for i, frame in ipairs(frames) do wrapped[i] = get(key, 'up') .. frame .. '}' end
  emit(tenant, parent, get(pk, 'conv'), wrapped)
end

-- Messages that this script can send itself: step -> {Redis list of its queue, message}; given where broker and state are one Redis.
local RING = {}

-- A step is to be sent: at once where its message is at hand, else into the outbox, and into the list for whoever runs this script to send.
local function offer(step, sends)
  local ring = RING[step]
  if ring then
    call('LPUSH', ring[1], ring[2])
    call('ZADD', 'tm:sent:' .. queue_of(string.match(step, '/(%l+)/%d+$')), text(NOW_MS), step)
    return
  end
  call('ZADD', 'tm:unsent', text(NOW_MS), step)
  sends[#sends + 1] = step
end

-- A step's message has arrived. The time at which it was sent moves its queue's mark, by which lost ones are told.
local function settle_delivery(step)
  local queue = queue_of(step.kind)
  local at = call('ZSCORE', 'tm:sent:' .. queue, step.text)
  if at then
    call('ZREM', 'tm:sent:' .. queue, step.text)
    put('tm:claimed', queue, at)
  else
    call('ZREM', 'tm:unsent', step.text)
  end
end

local function confirm_sent(steps)
  for _, text_ in ipairs(steps) do
    if call('ZREM', 'tm:unsent', text_) == 1 then
      call('ZADD', 'tm:sent:' .. queue_of(parse_step(text_).kind), text(NOW_MS), text_)
    end
  end
end

local function process_of(owner) return string.match(owner, '^[^#]*') end

local function claim_step(step, record, owner)
  local fence, attempt = record.fence + 1, record.attempt + 1
  write_step(step.key, step.field, 'running', fence, owner, attempt)
  call('SADD', 'tm:run:' .. process_of(owner), step.text)
  settle_delivery(step)
  return fence, attempt
end

local function release(step, owner)
  call('SREM', 'tm:run:' .. process_of(owner), step.text)
end

-- What is left of a claim that counts no more. A newer claim of the same process keeps its place, or nobody would find the step when that dies.
local function let_go(step, record, owner)
  if record and record.state == 'running' and process_of(record.owner) == process_of(owner) then return end
  release(step, owner)
end

-- The plan after a round that is closed, claimed in place by the process that closed it.
local function claim_following(step, owner)
  write_step(step.key, step.field, 'running', 1, owner, 1)
  call('SADD', 'tm:run:' .. process_of(owner), step.text)
end

-- Inputs that joined the turn while it ran become part of the log, for the next plan to see.
local function join_inputs(key, ck)
  if not get(key, 'steered') then return {} end
  local joined = call('LRANGE', key .. ':steer', 0, -1)
  for _, entry in ipairs(joined) do call('RPUSH', ck .. ':log', stamped(entry)) end
  call('DEL', key .. ':steer')
  drop(key, 'steered')
  return joined
end

-- Where the entries of a round wait for its end: the reply's, then those of the results.
local function entry_fields(key, round)
  local names = { 'le:' .. round }
  for i = 0, tonumber(get(key, 'n:' .. round)) - 1 do names[#names + 1] = 'lr:' .. round .. ':' .. text(i) end
  return names
end

-- An observe done at its claim: true when every call of the round has left its log entry. The entries go into the log, and the next plan is
-- claimed in place. Of a claim whose answer got lost that has been done already.
local function close_round(step, record, owner, ck)
  local key, round = step.key, step.round
  local following = parse_step(step.tenant .. '/' .. step.turn .. '/' .. text(tonumber(round) + 1) .. '/plan/0')
  if record.state == 'done' then
    local after = read_step(key, following.field)
    return record.owner == owner and after and after.state == 'running' and after.owner == owner and following
  end
  if not get(key, 'le:' .. round) then return false end
  local names = entry_fields(key, round)
  local entries = { fetch(key, unpack(names)) }
  for i = 1, #names do
    if not entries[i] then return false end
    entries[i] = stamped(entries[i])
  end
  call('RPUSH', ck .. ':log', unpack(entries, 1, #names))
  call('HDEL', key, unpack(names))
  settle_delivery(step)
  write_step(key, step.field, 'done', record.fence + 1, owner, record.attempt + 1)
  put(key, 'rounds', round)
  bump(key, 'v', 1)
  join_inputs(key, ck)
  claim_following(following, owner)
  return following
end

local function turn_frame(turn, state, position)
  local more = position and (',"position":' .. text(position)) or ''
  return '{"kind":"turn","turn_id":"' .. turn .. '","state":"' .. state .. '"' .. more .. '}'
end
