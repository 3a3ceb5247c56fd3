-- base.lua: the table of keys, and what everything else stands on. The files of this folder go in front of each script when it is loaded, those
-- of their functions that it uses: base, steps, approvals, rounds, turns.
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
--   tm:{tenant}:out:{name}           hash: one outbound delivery: created, state (due, sent, running, done, given_up), attempt, claim, process, until, sent_at (ms), code
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
