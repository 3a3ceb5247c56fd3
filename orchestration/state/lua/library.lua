-- library.lua: what every script of the journal shares; put in front of each when it is loaded.
--
-- Keys (prefix tm:, tenant in the name of everything that belongs to one)
--   tm:{tenant}:turn:{id}            hash: the turn's journal; fields below
--   tm:{tenant}:turn:{id}:steer      list: inputs that joined the turn while it ran
--   tm:{tenant}:conv:{id}            hash: agent, running (turn id), seq (last frame number), created, updated
--   tm:{tenant}:conv:{id}:log        list: entries of the conversation, oldest first
--   tm:{tenant}:conv:{id}:mail       list: waiting turns, in order
--   tm:{tenant}:conv:{id}:frames     stream: id "<seq>-0", t = turn id, f = frame without number and time
--   tm:{tenant}:conv:{id}:live       channel: "<seq> <turn id> <frame>"
--   tm:{tenant}:ap:{id}              hash: one approval          tm:{tenant}:ap:pending  zset: undecided ids by time asked
--   tm:{tenant}:idem:{scope}:{key}   string: the answer to a submission with this key
--   tm:{tenant}:waiting              number of turns in the tenant's mailboxes
--   tm:unsent                        zset: steps committed but not known to be sent, by time (ms)
--   tm:sent:{queue}                  zset: steps sent but not claimed, by time sent (ms)
--   tm:claimed                       hash: queue -> the latest time sent of a step that was claimed
--   tm:leases                        zset: process -> end of its lease (ms)      tm:run:{process}  set: its running steps
--   tm:deposed                       set: processes that lost their lease and still have steps to be passed on
--   tm:due                           zset: what is due, by time (ms): step:… deadline:… expire:… cancel:…
--
-- Fields of a turn: req (JSON, never changes), entry (its input as a log entry), state, stop, agent, rounds, in, out, started, ended,
--   trace (traceparent), h:{round} (its chord, JSON), seq0, seqn (numbers of its first and last frame), answer, error, aps (ids of its approvals), chords (rounds with one), v (version);
--   s:{round}:{kind}:{index} = "state|fence|owner|attempt", state one of ready, gated, parked, later, running, done; owner is "process#claim";
--   p:{round} the model's reply; n:{round} number of calls; left:{round} calls without a result; wait:{round} calls at a human;
--   c:{round}:{i} the call; cs:{round}:{i} its state; cr:{round}:{i} its result; cb:/ce: when it began and ended (ms)
-- JSON made elsewhere is passed through as text and never decoded and encoded again: it would change numbers and empty lists.

local FRAMES_KEPT, TURN_KEPT_S, CONVERSATION_KEPT_S, APPROVAL_KEPT_S, LOST_AFTER_MS = $frames_kept, $turn_kept_s, $conversation_kept_s, $approval_kept_s, $lost_after_ms
local CHORD_GRACE_MS = 5000 -- how long a chord may take to deliver its body before the journal does

local call = redis.call
local clock = call('TIME')
local NOW_US = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local NOW_MS = math.floor(NOW_US / 1000)

local function text(number) return string.format('%.0f', number) end
local function turn_key(tenant, turn) return 'tm:' .. tenant .. ':turn:' .. turn end
local function conv_key(tenant, conv) return 'tm:' .. tenant .. ':conv:' .. conv end
local function approval_key(tenant, id) return 'tm:' .. tenant .. ':ap:' .. id end
local function stamped(json) return '{"ms":' .. text(NOW_MS) .. ',' .. string.sub(json, 2) end

local ENDED = { completed = true, failed = true, cancelled = true }
local function has_ended(state) return ENDED[state] == true end

local function parse_step(step)
  local tenant, turn, round, kind, index = string.match(step, '^([^/]+)/([^/]+)/(%d+)/(%l+)/(%d+)$')
  return { text = step, tenant = tenant, turn = turn, round = round, kind = kind, index = index,
           key = turn_key(tenant, turn), field = 's:' .. round .. ':' .. kind .. ':' .. index }
end

local function queue_of(kind)
  if kind == 'tool' then return 'tools' end
  if kind == 'decide' then return 'control' end
  return 'plan'
end

local function read_step(key, field)
  local raw = call('HGET', key, field)
  if not raw then return nil end
  local state, fence, owner, attempt = string.match(raw, '^(%l+)|(%d+)|([^|]*)|(%d+)$')
  return { state = state, fence = tonumber(fence), owner = owner, attempt = tonumber(attempt) }
end

local function write_step(key, field, state, fence, owner, attempt)
  call('HSET', key, field, state .. '|' .. text(fence) .. '|' .. owner .. '|' .. text(attempt))
end

-- Frames get their numbers here: max(last + 1, now in microseconds), so that none goes back even after a restore.
local function emit(tenant, turn, conv, frames)
  if #frames == 0 then return end
  local ck = conv_key(tenant, conv)
  local seq = tonumber(call('HGET', ck, 'seq') or '0')
  local first
  for _, frame in ipairs(frames) do
    seq = math.max(seq + 1, NOW_US)
    local id = text(seq)
    first = first or id
    call('XADD', ck .. ':frames', 'MAXLEN', '~', FRAMES_KEPT, id .. '-0', 't', turn, 'f', frame)
    call('PUBLISH', ck .. ':live', id .. ' ' .. turn .. ' ' .. frame)
  end
  call('HSET', ck, 'seq', text(seq))
  local key = turn_key(tenant, turn)
  call('HSETNX', key, 'seq0', first)
  call('HSET', key, 'seqn', text(seq))
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

local function settle_delivery(step)
  call('ZREM', 'tm:unsent', step.text)
  local sent = 'tm:sent:' .. queue_of(step.kind)
  local at = call('ZSCORE', sent, step.text)
  if at then
    call('ZREM', sent, step.text)
    local queue = queue_of(step.kind)
    local latest = call('HGET', 'tm:claimed', queue)
    if not latest or tonumber(at) > tonumber(latest) then call('HSET', 'tm:claimed', queue, at) end
  end
end

local function confirm_sent(steps)
  for _, text_ in ipairs(steps) do
    if call('ZREM', 'tm:unsent', text_) == 1 then
      call('ZADD', 'tm:sent:' .. queue_of(parse_step(text_).kind), text(NOW_MS), text_)
    end
  end
end

local function process_of(owner) return string.match(owner, '^[^#]+') end

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

local function turn_frame(turn, state, position)
  local more = position and (',"position":' .. text(position)) or ''
  return '{"kind":"turn","turn_id":"' .. turn .. '","state":"' .. state .. '"' .. more .. '}'
end

local function start_turn(tenant, turn, conv, sends)
  local key, ck = turn_key(tenant, turn), conv_key(tenant, conv)
  local step = tenant .. '/' .. turn .. '/1/plan/0'
  call('HSET', key, 'state', 'running', 'started', text(NOW_MS), 'rounds', '0')
  call('HINCRBY', key, 'v', 1)
  write_step(key, 's:1:plan:0', 'ready', 0, '', 0)
  call('HSET', ck, 'running', turn, 'updated', text(NOW_MS))
  for _, suffix in ipairs({ '', ':log', ':frames' }) do call('PERSIST', ck .. suffix) end
  local entry, deadline = unpack(call('HMGET', key, 'entry', 'deadline_s'))
  call('RPUSH', ck .. ':log', stamped(entry))
  if deadline then call('ZADD', 'tm:due', text(NOW_MS + tonumber(deadline) * 1000), 'deadline:' .. tenant .. '/' .. turn) end
  emit(tenant, turn, conv, { turn_frame(turn, 'running') })
  offer(step, sends)
end

local function close_approval(tenant, id, state)
  local ak = approval_key(tenant, id)
  local current = call('HGET', ak, 'state')
  if current == 'pending' or current == 'held' then
    call('HSET', ak, 'state', state, 'decided_at', text(NOW_MS))
    call('ZREM', 'tm:' .. tenant .. ':ap:pending', id)
    call('ZREM', 'tm:due', 'expire:' .. tenant .. '/' .. id)
    call('EXPIRE', ak, APPROVAL_KEPT_S)
  end
end

-- The turn's end: final, once; what waits for it starts. `fin` has state, stop and perhaps answer, output, error (all text).
local function end_turn(tenant, turn, conv, fin, sends)
  local key, ck = turn_key(tenant, turn), conv_key(tenant, conv)
  call('HSET', key, 'state', fin.state, 'stop', fin.stop, 'ended', text(NOW_MS))
  for _, name in ipairs({ 'answer', 'output', 'error' }) do
    if fin[name] then call('HSET', key, name, fin[name]) end
  end
  for id in string.gmatch(call('HGET', key, 'aps') or '', '%S+') do close_approval(tenant, id, 'cancelled') end
  for round in string.gmatch(call('HGET', key, 'chords') or '', '%d+') do
    local group = 'celery-taskset-meta-' .. turn .. '.' .. round
    call('UNLINK', group .. '.s', group .. '.j', group .. '.d', group .. '.t')
  end
  call('ZREM', 'tm:due', 'deadline:' .. tenant .. '/' .. turn, 'cancel:' .. tenant .. '/' .. turn)
  call('EXPIRE', key, TURN_KEPT_S)
  -- an input that joined too late to be answered is not lost: the next turn's model reads it
  for _, entry in ipairs(call('LRANGE', key .. ':steer', 0, -1)) do call('RPUSH', ck .. ':log', stamped(entry)) end
  call('DEL', key .. ':steer')
  if call('HGET', ck, 'running') ~= turn then
    -- ended while it waited: it only leaves the mailbox
    if call('LREM', ck .. ':mail', 1, turn) > 0 then call('DECR', 'tm:' .. tenant .. ':waiting') end
    return
  end
  while true do
    local following = call('LPOP', ck .. ':mail')
    if not following then
      call('HDEL', ck, 'running')
      call('HSET', ck, 'updated', text(NOW_MS))
      for _, suffix in ipairs({ '', ':log', ':frames' }) do call('EXPIRE', ck .. suffix, CONVERSATION_KEPT_S) end
      return
    end
    call('DECR', 'tm:' .. tenant .. ':waiting')
    if call('HGET', turn_key(tenant, following), 'state') == 'queued' then
      start_turn(tenant, following, conv, sends)
      return
    end
  end
end

-- After a call of a round ended: the round's observe is due when none is open; the turn waits when all open ones are at a human.
local function after_call(tenant, turn, conv, round, sends, frames)
  local key = turn_key(tenant, turn)
  local left = tonumber(call('HGET', key, 'left:' .. round))
  if left == 0 then
    local field = 's:' .. round .. ':observe:0'
    if not call('HGET', key, field) then
      local step = tenant .. '/' .. turn .. '/' .. round .. '/observe/0'
      write_step(key, field, 'ready', 0, '', 0)
      if call('HGET', key, 'state') == 'waiting' then
        call('HSET', key, 'state', 'running')
        frames[#frames + 1] = turn_frame(turn, 'running')
      end
      if call('HEXISTS', key, 'h:' .. round) == 1 then
        -- the chord's body delivers it; looked for soon, in case that the chord is broken
        call('ZADD', 'tm:sent:plan', text(NOW_MS - LOST_AFTER_MS + CHORD_GRACE_MS), step)
      else
        offer(step, sends)
      end
    end
  elseif left == tonumber(call('HGET', key, 'wait:' .. round) or '0') then
    if call('HGET', key, 'state') == 'running' then
      call('HSET', key, 'state', 'waiting')
      frames[#frames + 1] = turn_frame(turn, 'waiting')
    end
  elseif call('HGET', key, 'state') == 'waiting' then
    call('HSET', key, 'state', 'running')
    frames[#frames + 1] = turn_frame(turn, 'running')
  end
end
