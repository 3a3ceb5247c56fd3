-- library.lua: what every script of the journal shares; put in front of each when it is loaded.
--
-- Keys (prefix tm:, tenant in the name of everything that belongs to one)
--   tm:{tenant}:turn:{id}            hash: the turn's journal; fields below
--   tm:{tenant}:turn:{id}:steer      list: inputs that joined the turn while it ran
--   tm:{tenant}:turn:{id}:token      string: the caller's token, sealed; gone when it has expired and at the turn's end
--   tm:{tenant}:conv:{id}            hash: agent (of its first turn), running (turn id), seq (last frame number), created, updated, kept_s (when it is kept for less than others)
--   tm:{tenant}:conv:{id}:log        list: entries of the conversation, oldest first
--   tm:{tenant}:conv:{id}:mail       list: waiting turns, in order
--   tm:{tenant}:conv:{id}:frames     stream: id "<seq>-0", t = turn id, f = frame without number and time
--   tm:{tenant}:conv:{id}:live       channel: "<seq> <turn id> <frame>"
--   tm:{tenant}:ap:{id}              hash: one approval; fields below
--   tm:{tenant}:aps:{state}          zset: the approvals in this state, by order number; with :{agent} behind it those of one agent
--   tm:{tenant}:aps                  the last order number: Redis's time in microseconds, or one above the last
--   tm:{tenant}:audit                stream: id "<order number>-0", e = entry (JSON) without number and time
--   tm:{tenant}:out:{name}           hash: one outbound delivery: created, state (due, sent, running, done, given_up), attempt, claim, process, until (ms), code
--   tm:{tenant}:idem:{scope}:{key}   string: the answer to a submission with this key
--   tm:{tenant}:waiting              number of turns in the tenant's mailboxes
--   tm:unsent                        zset: steps committed but not known to be sent, by time (ms)
--   tm:sent:{queue}                  zset: steps sent but not claimed, by time sent (ms)
--   tm:claimed                       hash: queue -> the latest time sent of a step that was claimed
--   tm:leases                        zset: process -> end of its lease (ms)      tm:run:{process}  set: its running steps
--   tm:deposed                       set: processes that lost their lease and still have steps to be passed on
--   tm:due                           zset: what is due, by time (ms): step:… deadline:… expire:… remind:… out:… cancel:…
--   tm:secret:{name}                 string: a secret of the deployment's, made when it was first needed
--   tm:model:{name}:…               places and rates of a model with limits; see model_take.lua
--
-- Fields of a turn: req (JSON, never changes), entry (its input as a log entry), state, stop, agent, rounds, in, out, started, ended,
--   trace (traceparent), h:{round} (its chord, JSON), steered (inputs joined it), seq0, seqn (numbers of its first and last frame), answer, error, aps (ids of its approvals), chords (rounds with one), v (version), last (the change from outside that made it);
--   s:{round}:{kind}:{index} = "state|fence|owner|attempt", state one of ready, gated, parked, later, running, done; owner is "process#claim";
--   p:{round} the model's reply; n:{round} number of calls; left:{round} calls without a result; wait:{round} calls at a human;
--   c:{round}:{i} the call; cs:{round}:{i} its state; cr:{round}:{i} its result; cb:/ce: when it began and ended (ms);
--   le:{round}, lr:{round}:{i} until the round is closed: entries of the log, of the reply and of each call's result;
--   ca:{round}:{i} its approval; ok:{round}:{i} the approved arguments; humans, runs: undecided approvals of it and of the turns it waits for, and those under which the deadline runs;
--   clock what is left of the deadline (ms) while it stands still; cancel_by, cancel_from who ended what it ran for (JSON); tell the ways in which the turn's end is told to the outside;
--   ended_by the agent whose on_round is one of these
--   active the agent that goes on with it after a handoff; cost (millionths), tools (asked by it), asked (model calls); seq:{round} its calls run in order;
--   token until when the caller's token holds (ms), where one was kept
--   of a turn that runs for a call of another's: parent = "turn round index", up and told, the beginnings of frames of that turn's;
--   joined in place of all these: the turn that an input joined instead of becoming one of its own; kept for 10 minutes, in case it is submitted again;
--   of the other: kids (turns started), kid:{round}:{i} the turn that answers this call, kw:{round}:{i} 1 while that waits for a human
-- Fields of a conversation besides those above: active, active_from (the agent that goes on with turns addressed to that one), compacted (the view
--   that is sent of its older part), last_in (input tokens of its last model call), in, out, cost, tools, asked (what all its turns used)
-- Fields of an approval: v (version), last (the change that made it), n (order number while it is open), audit (numbers of its audit entries),
--   clock 1 when the turn's deadline runs meanwhile, decisions (JSON list, each with its time); the others as in core/approval.py
-- JSON made elsewhere is passed through as text and never decoded and encoded again: it would change numbers and empty lists.

local FRAMES_KEPT, TURN_KEPT_S, CONVERSATION_KEPT_S, APPROVAL_KEPT_S, LOST_AFTER_MS = $frames_kept, $turn_kept_s, $conversation_kept_s, $approval_kept_s, $lost_after_ms
local AUDIT_KEPT_S = $audit_kept_s
local CHORD_GRACE_MS = 5000 -- how long a chord may take to deliver its body before the journal does

local call = redis.call
local clock = call('TIME')
local NOW_US = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local NOW_MS = math.floor(NOW_US / 1000)

-- Hashes are read through a memory of this one run and written back in one HSET a key when it ends (`flush`, called by whoever
-- loads the script). A field that goes through `put` must be read through `get`.
local seen, changed = {}, {}
local function remembered(key)
  local fields = seen[key]
  if not fields then fields = {} seen[key] = fields end
  return fields
end
local function fetch(key, ...)
  local fields, names = remembered(key), { ... }
  local found = call('HMGET', key, ...)
  for i, name in ipairs(names) do
    if fields[name] == nil then fields[name] = found[i] end -- what this run has put stays
    found[i] = fields[name]
  end
  return unpack(found, 1, #names)
end
local function get(key, field)
  local fields = remembered(key)
  if fields[field] == nil then fields[field] = call('HGET', key, field) end
  return fields[field]
end
local function put(key, ...)
  local fields, writes, given = remembered(key), changed[key], { ... }
  if not writes then writes = {} changed[key] = writes end
  for i = 1, #given, 2 do
    fields[given[i]] = given[i + 1]
    writes[given[i]] = given[i + 1] or nil -- false: known to be absent, nothing to write
  end
end
local function drop(key, field)
  remembered(key)[field] = false
  if changed[key] then changed[key][field] = nil end
  call('HDEL', key, field)
end
local function flush()
  for key, writes in pairs(changed) do
    local list = {}
    for field, value in pairs(writes) do
      list[#list + 1] = field
      list[#list + 1] = value
    end
    if #list > 0 then call('HSET', key, unpack(list)) end
  end
end

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

local function bump(key, field, by)
  local value = tonumber(get(key, field) or '0') + by
  put(key, field, text(value))
  return value
end

local function read_step(key, field)
  local raw = get(key, field)
  if not raw then return nil end
  local state, fence, owner, attempt = string.match(raw, '^(%l+)|(%d+)|([^|]*)|(%d+)$')
  return { state = state, fence = tonumber(fence), owner = owner, attempt = tonumber(attempt) }
end

local function write_step(key, field, state, fence, owner, attempt)
  put(key, field, state .. '|' .. text(fence) .. '|' .. owner .. '|' .. text(attempt))
end

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

-- The caller's token of a turn (sealed, none when it has expired), and until when it holds (ms, false where there never was one).
local function keep_token(key, ends, sealed)
  put(key, 'token', ends)
  if ends and sealed then call('SET', key .. ':token', sealed, 'PXAT', ends) end
end

local function start_turn(tenant, turn, conv, sends)
  local key, ck = turn_key(tenant, turn), conv_key(tenant, conv)
  local step = tenant .. '/' .. turn .. '/1/plan/0'
  put(key, 'state', 'running', 'started', text(NOW_MS), 'rounds', '0')
  bump(key, 'v', 1)
  write_step(key, 's:1:plan:0', 'ready', 0, '', 0)
  put(ck, 'running', turn, 'updated', text(NOW_MS))
  if call('PERSIST', ck) == 1 then
    call('PERSIST', ck .. ':log')
    call('PERSIST', ck .. ':frames')
  end
  local entry, deadline = get(key, 'entry'), get(key, 'deadline_s')
  call('RPUSH', ck .. ':log', stamped(entry))
  if deadline then call('ZADD', 'tm:due', text(NOW_MS + tonumber(deadline) * 1000), 'deadline:' .. tenant .. '/' .. turn) end
  emit(tenant, turn, conv, { turn_frame(turn, 'running') })
  offer(step, sends)
end

-- A delivery to the outside becomes due, once whatever its name is committed.
local function tell(tenant, name)
  local key = 'tm:' .. tenant .. ':out:' .. name
  if call('HSETNX', key, 'created', text(NOW_MS)) == 0 then return end
  put(key, 'state', 'due', 'attempt', '0')
  call('EXPIRE', key, TURN_KEPT_S)
  call('ZADD', 'tm:due', text(NOW_MS), 'out:' .. tenant .. '/' .. name)
end

local function next_number(tenant)
  local key = 'tm:' .. tenant .. ':aps'
  local number = text(math.max(tonumber(call('GET', key) or '0') + 1, NOW_US))
  call('SET', key, number)
  return number
end

local function audit(tenant, id, entry)
  local number, key, ak = next_number(tenant), 'tm:' .. tenant .. ':audit', approval_key(tenant, id)
  call('XADD', key, number .. '-0', 'e', entry)
  if AUDIT_KEPT_S > 0 then call('XTRIM', key, 'MINID', text(NOW_US - AUDIT_KEPT_S * 1000000) .. '-0') end
  put(ak, 'audit', (get(ak, 'audit') or '') .. ' ' .. number)
end

-- An audit entry that is made here; `by`, `from` and `ran` are JSON texts or nil.
local function audit_event(tenant, turn, id, event, by, from, ran)
  audit(tenant, id, '{"event":"' .. event .. '","by":' .. (by or 'null') .. ',"from":' .. (from or 'null') .. ',"approval_id":"' .. id
    .. '","turn_id":"' .. turn .. '","shown":null,"decided":null,"ran":' .. (ran or 'null') .. '}')
end

-- The result of an approved call: what ran, with which arguments, and who ended it before its answer came (JSON texts or nil).
-- Calls without an approval leave no trace here.
local function audit_call(tenant, turn, place, state, refused, by, from)
  local id, arguments = fetch(turn_key(tenant, turn), 'ca:' .. place, 'ok:' .. place)
  if not id or not arguments then return end
  local ran = not refused and (state == 'completed' or state == 'failed' or state == 'unknown_outcome')
  audit_event(tenant, turn, id, ran and 'ran' or 'not_run', by, from, '{"state":"' .. state .. '","arguments":' .. arguments .. '}')
end

-- Moves an approval between the indexes of states; what is decided is kept in the order in which that happened.
local function index_approval(tenant, id, agent, from, to)
  local base, ak = 'tm:' .. tenant .. ':aps:', approval_key(tenant, id)
  local open = to == 'pending' or to == 'held'
  local number = open and get(ak, 'n') or next_number(tenant)
  if open then put(ak, 'n', number) end
  for _, suffix in ipairs({ '', ':' .. agent }) do
    if from then call('ZREM', base .. from .. suffix, id) end
    call('ZADD', base .. to .. suffix, number, id)
    if not open then call('ZREMRANGEBYSCORE', base .. to .. suffix, '-inf', text(NOW_US - APPROVAL_KEPT_S * 1000000)) end
  end
end

-- When an approval expires and when somebody is reminded (ms as text; none for never).
local function expire_approval(tenant, id, expires_at, remind_at)
  for kind, at in pairs({ expire = expires_at or '', remind = remind_at or '' }) do
    local entry = kind .. ':' .. tenant .. '/' .. id
    if at == '' then call('ZREM', 'tm:due', entry) else call('ZADD', 'tm:due', at, entry) end
  end
  put(approval_key(tenant, id), 'expires_at', (expires_at and expires_at ~= '') and expires_at or '0')
end

-- A turn's deadline stands still while a human is asked about one of its calls, unless one of the gates lets it run.
local function keep_time(tenant, turn)
  local key, entry = turn_key(tenant, turn), 'deadline:' .. tenant .. '/' .. turn
  local asked, runs, left = fetch(key, 'humans', 'runs', 'clock')
  local still = tonumber(asked or '0') > 0 and tonumber(runs or '0') == 0
  if still and not left then
    local at = call('ZSCORE', 'tm:due', entry)
    if not at then return end
    put(key, 'clock', text(math.max(tonumber(at) - NOW_MS, 1)))
    call('ZREM', 'tm:due', entry)
  elseif left and not still then
    call('ZADD', 'tm:due', text(NOW_MS + tonumber(left)), entry)
    drop(key, 'clock')
  end
end

-- One human more, or less, is asked for a turn, and so for the turns that wait for it; `runs` when their deadlines go on meanwhile.
local function count_human(tenant, turn, by, runs)
  while turn do
    local key = turn_key(tenant, turn)
    local state, parent = fetch(key, 'state', 'parent')
    if state and not has_ended(state) then
      bump(key, 'humans', by)
      if runs then bump(key, 'runs', by) end
      keep_time(tenant, turn)
    end
    turn = parent and string.match(parent, '^%S+')
  end
end

-- A human is asked: `a` has id, agent, round, index, fields {field: text}, audit (JSON text), tell [names] and perhaps expires_at, remind_at, clock.
local function ask_human(tenant, turn, a)
  local key, ak, place = turn_key(tenant, turn), approval_key(tenant, a.id), a.round .. ':' .. a.index
  for field, value in pairs(a.fields) do put(ak, field, value) end
  put(ak, 'requested_at', text(NOW_MS))
  index_approval(tenant, a.id, a.agent, nil, 'pending')
  expire_approval(tenant, a.id, a.expires_at, a.remind_at)
  put(key, 'aps', (get(key, 'aps') or '') .. ' ' .. a.id, 'ca:' .. place, a.id)
  if a.clock then put(ak, 'clock', '1') end
  count_human(tenant, turn, 1, a.clock)
  audit(tenant, a.id, a.audit)
  for _, name in ipairs(a.tell or {}) do tell(tenant, name) end
end

-- An approval's end: it leaves what is waited for.
local function end_approval(tenant, id, from, to)
  local ak = approval_key(tenant, id)
  local turn, agent, runs = fetch(ak, 'turn_id', 'agent', 'clock')
  put(ak, 'state', to, 'decided_at', text(NOW_MS))
  index_approval(tenant, id, agent, from, to)
  for _, kind in ipairs({ 'expire:', 'remind:' }) do call('ZREM', 'tm:due', kind .. tenant .. '/' .. id) end
  count_human(tenant, turn, -1, runs)
  call('EXPIRE', ak, APPROVAL_KEPT_S)
end

-- Ends an approval with its turn or call, if it is open; `by` and `from` are JSON texts or nil.
local function close_approval(tenant, turn, id, to, by, from)
  local current = get(approval_key(tenant, id), 'state')
  if current ~= 'pending' and current ~= 'held' then return end
  end_approval(tenant, id, current, to)
  audit_event(tenant, turn, id, to, by, from)
end

-- In a round whose calls run one after the other: whether all before this one have ended, and sending the one whose turn has come.
local function its_turn(key, round, index)
  for i = 0, tonumber(index) - 1 do
    if not get(key, 'cr:' .. round .. ':' .. text(i)) then return false end
  end
  return true
end
local function offer_next(tenant, turn, round, sends)
  local key = turn_key(tenant, turn)
  for i = 0, tonumber(get(key, 'n:' .. round)) - 1 do
    local place = round .. ':' .. text(i)
    if not get(key, 'cr:' .. place) then
      local name = tenant .. '/' .. turn .. '/' .. round .. '/tool/' .. text(i)
      local record = read_step(key, 's:' .. round .. ':tool:' .. text(i))
      local on_its_way = call('ZSCORE', 'tm:unsent', name) or call('ZSCORE', 'tm:sent:tools', name)
      if record.state == 'ready' and not on_its_way then offer(name, sends) end
      return
    end
  end
end

-- Whether nothing of a round goes on before a human decides: all open calls are at one, or, in order, the first of them is.
local function at_humans(key, round, left)
  if left == tonumber(get(key, 'wait:' .. round) or '0') then return true end
  if not get(key, 'seq:' .. round) then return false end
  for i = 0, tonumber(get(key, 'n:' .. round)) - 1 do
    local place = round .. ':' .. text(i)
    if not get(key, 'cr:' .. place) then return get(key, 'cs:' .. place) == 'waiting' or get(key, 'kw:' .. place) == '1' end
  end
  return false
end

-- After a call of a round ended, or went to a human: the round's observe is due when none is open, the turn waits while all are at humans.
-- Where the turn runs for a call of another turn's, that call waits with it.
local function after_call(tenant, turn, conv, round, sends, frames)
  local key = turn_key(tenant, turn)
  local left, before = tonumber(get(key, 'left:' .. round)), get(key, 'state')
  if left == 0 then
    local field = 's:' .. round .. ':observe:0'
    if not get(key, field) then
      local step = tenant .. '/' .. turn .. '/' .. round .. '/observe/0'
      write_step(key, field, 'ready', 0, '', 0)
      if get(key, 'state') == 'waiting' then
        put(key, 'state', 'running')
        frames[#frames + 1] = turn_frame(turn, 'running')
      end
      if get(key, 'h:' .. round) then
        -- the chord's body delivers it; looked for soon, in case that the chord is broken
        call('ZADD', 'tm:sent:plan', text(NOW_MS - LOST_AFTER_MS + CHORD_GRACE_MS), step)
      else
        offer(step, sends)
      end
    end
  elseif at_humans(key, round, left) then
    if before == 'running' then
      put(key, 'state', 'waiting')
      frames[#frames + 1] = turn_frame(turn, 'waiting')
    end
  elseif before == 'waiting' then
    put(key, 'state', 'running')
    frames[#frames + 1] = turn_frame(turn, 'running')
  end
  if left > 0 and get(key, 'seq:' .. round) then offer_next(tenant, turn, round, sends) end
  local state = get(key, 'state')
  if state == before or not get(key, 'parent') then return end
  local parent, parent_round, index = string.match(get(key, 'parent'), '^(%S+) (%d+) (%d+)$')
  local pk, place = turn_key(tenant, parent), parent_round .. ':' .. index
  if has_ended(get(pk, 'state') or 'completed') or get(pk, 'cr:' .. place) then return end
  if state == 'waiting' then put(pk, 'kw:' .. place, '1') else drop(pk, 'kw:' .. place) end
  bump(pk, 'wait:' .. parent_round, state == 'waiting' and 1 or -1)
  local more = {}
  after_call(tenant, parent, get(pk, 'conv'), parent_round, sends, more)
  emit(tenant, parent, get(pk, 'conv'), more)
end

-- An agent is asked by a call of another's: its turn starts in a conversation of its own, within the caller's deadline, and its end settles
-- the call. `child` has turn, conv, agent, request, entry (JSON texts), trace, up and told (the beginnings of frames of the caller's), deadline_s or "".
local function start_child(tenant, parent, round, index, child, sends)
  local key, pk, ck = turn_key(tenant, child.turn), turn_key(tenant, parent), conv_key(tenant, child.conv)
  if get(key, 'state') then return end
  put(key, 'req', child.request, 'entry', child.entry, 'agent', child.agent, 'conv', child.conv, 'created', text(NOW_MS), 'v', '0',
    'parent', parent .. ' ' .. round .. ' ' .. index, 'up', child.up, 'told', child.told)
  if child.trace ~= '' then put(key, 'trace', child.trace) end
  local ends = get(pk, 'token')
  keep_token(key, ends, ends and call('GET', pk .. ':token'))
  -- the caller's deadline needs no copy here, which would run on while that stands still: it ends the caller, and so this
  if child.deadline_s ~= '' then put(key, 'deadline_s', child.deadline_s) end
  put(ck, 'agent', child.agent, 'created', text(NOW_MS))
  local kept_s = get(conv_key(tenant, get(pk, 'conv')), 'kept_s')
  if kept_s then put(ck, 'kept_s', kept_s) end
  put(pk, 'kid:' .. round .. ':' .. index, child.turn, 'kids', (get(pk, 'kids') or '') .. ' ' .. child.turn)
  start_turn(tenant, child.turn, child.conv, sends)
end

-- Whether the call for which a turn runs waits for it no more: nothing of it begins then, until it is cancelled.
local function orphaned(tenant, turn)
  local where = get(turn_key(tenant, turn), 'parent')
  if not where then return false end
  local parent, round, index = string.match(where, '^(%S+) (%d+) (%d+)$')
  local pk = turn_key(tenant, parent)
  if has_ended(get(pk, 'state') or 'completed') or get(pk, 'cr:' .. round .. ':' .. index) then return true end
  return orphaned(tenant, parent)
end

-- What a turn uses counts at once for those that asked for it and for their conversations, so that all whom they asked see what is left.
local function spend_above(tenant, turn, spend)
  local where = get(turn_key(tenant, turn), 'parent')
  if not where then return end
  local parent = string.match(where, '^%S+')
  local pk = turn_key(tenant, parent)
  local state, conv = fetch(pk, 'state', 'conv', 'parent', 'in', 'out', 'cost', 'tools')
  if not state then return end
  if not has_ended(state) then
    for _, field in ipairs({ 'in', 'out', 'cost', 'tools' }) do
      local used = spend[field]
      if used then
        bump(pk, field, used)
        bump(conv_key(tenant, conv), field, used)
      end
    end
  end
  spend_above(tenant, parent, spend)
end

-- What a step has used: {in, out, cost, tools, asked}.
local function spend(tenant, turn, conv, used)
  local key, ck = turn_key(tenant, turn), conv_key(tenant, conv)
  for field, number in pairs(used) do
    bump(key, field, number)
    bump(ck, field, number)
  end
  if get(key, 'parent') then spend_above(tenant, turn, used) end
end

-- Nobody waits any more for the turn that a call has started: it is to be cancelled, for whoever ended the wait (JSON texts or nil).
local function abandon(tenant, child, by, from)
  local key = turn_key(tenant, child)
  if has_ended(get(key, 'state') or 'completed') then return end
  if not get(key, 'cancel_by') then put(key, 'cancel_by', by or 'null', 'cancel_from', from or 'null') end
  call('ZADD', 'tm:due', text(NOW_MS), 'cancel:' .. tenant .. '/' .. child)
end

-- The end of a turn that ran for a call: what the call's model reads is `fin.told` (JSON text, with its frame in `fin.told_frame`), or why it failed.
local function settle_call(tenant, turn, fin, sends)
  local key = turn_key(tenant, turn)
  local parent, round, index = string.match(get(key, 'parent'), '^(%S+) (%d+) (%d+)$')
  local pk, place, field = turn_key(tenant, parent), round .. ':' .. index, 's:' .. round .. ':tool:' .. index
  local state, conv = fetch(pk, 'state', 'conv', 'v', 'left:' .. round, 'cr:' .. place, field, 'seq0', 'h:' .. round)
  if not state or has_ended(state) then return end
  if get(pk, 'cr:' .. place) then return end
  local record, told, frame = read_step(pk, field), fin.told, fin.told_frame
  if not told then
    local code = 'agent_' .. fin.stop
    local why = string.gsub(string.gsub(fin.error or ('{"code":"' .. code .. '"}'), '\\', '\\\\'), '"', '\\"')
    told = '{"state":"failed","content":"' .. why .. '","code":"' .. code .. '"}'
    frame = get(key, 'told') .. ',"content":"' .. why .. '","error":true}'
  end
  local ended = fin.told and 'completed' or 'failed'
  write_step(pk, field, 'done', record.fence, '', record.attempt)
  put(pk, 'cs:' .. place, ended, 'cr:' .. place, told, 'ce:' .. place, text(NOW_MS))
  bump(pk, 'v', 1)
  bump(pk, 'left:' .. round, -1)
  if get(pk, 'kw:' .. place) then
    drop(pk, 'kw:' .. place)
    bump(pk, 'wait:' .. round, -1)
  end
  audit_call(tenant, parent, place, ended)
  local frames = { frame }
  if get(pk, 'h:' .. round) then offer(tenant .. '/' .. parent .. '/' .. round .. '/decide/' .. index, sends) end
  after_call(tenant, parent, conv, round, sends, frames)
  emit(tenant, parent, conv, frames)
end

-- The turn's end: final, once; what waits for it starts. `fin` has state, stop and perhaps answer, output, error (all text),
-- by and from (who cancelled it, from where: JSON texts), told and told_frame (see settle_call), tell (one more way to tell of the end).
local function end_turn(tenant, turn, conv, fin, sends)
  local key, ck = turn_key(tenant, turn), conv_key(tenant, conv)
  put(key, 'state', fin.state, 'stop', fin.stop, 'ended', text(NOW_MS))
  for _, name in ipairs({ 'answer', 'output', 'error' }) do
    if fin[name] then put(key, name, fin[name]) end
  end
  for id in string.gmatch(get(key, 'aps') or '', '%S+') do close_approval(tenant, turn, id, 'cancelled', fin.by, fin.from) end
  for way in string.gmatch((get(key, 'tell') or '') .. ' ' .. (fin.tell or ''), '%S+') do tell(tenant, way .. '.turn_ended.' .. turn .. '.1') end
  for round in string.gmatch(get(key, 'chords') or '', '%d+') do
    local group = 'celery-taskset-meta-' .. turn .. '.' .. round
    call('UNLINK', group .. '.s', group .. '.j', group .. '.d', group .. '.t')
    call('SET', group .. '.c', 'done', 'EX', 86400) -- Celery's own mark: a header that ends late makes no new keys
  end
  call('ZREM', 'tm:due', 'deadline:' .. tenant .. '/' .. turn, 'cancel:' .. tenant .. '/' .. turn)
  if get(key, 'token') then call('UNLINK', key .. ':token') end
  for child in string.gmatch(get(key, 'kids') or '', '%S+') do abandon(tenant, child, fin.by, fin.from) end
  if get(key, 'parent') then settle_call(tenant, turn, fin, sends) end
  local kept_s = get(ck, 'kept_s') -- of a conversation that is not to be kept
  call('EXPIRE', key, kept_s or TURN_KEPT_S)
  -- an input that joined too late to be answered is not lost: the next turn's model reads it
  if get(key, 'steered') then
    for _, entry in ipairs(call('LRANGE', key .. ':steer', 0, -1)) do call('RPUSH', ck .. ':log', stamped(entry)) end
    call('DEL', key .. ':steer')
  end
  if get(ck, 'running') ~= turn then
    -- ended while it waited: it only leaves the mailbox
    if call('LREM', ck .. ':mail', 1, turn) > 0 then call('DECR', 'tm:' .. tenant .. ':waiting') end
    return
  end
  while true do
    local following = call('LPOP', ck .. ':mail')
    if not following then
      drop(ck, 'running')
      put(ck, 'updated', text(NOW_MS))
      for _, suffix in ipairs({ '', ':log', ':frames' }) do call('EXPIRE', ck .. suffix, kept_s or CONVERSATION_KEPT_S) end
      return
    end
    call('DECR', 'tm:' .. tenant .. ':waiting')
    if get(turn_key(tenant, following), 'state') == 'queued' then
      start_turn(tenant, following, conv, sends)
      return
    end
  end
end
