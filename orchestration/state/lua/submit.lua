-- submit.lua: put a turn into its conversation's mailbox, once per idempotency key; start it when nothing else runs.
-- ARGV  1 tenant  2 conversation  3 turn  4 request (JSON)  5 log entry (JSON)  6 agent  7 on_busy when it runs  8 on_busy when it waits
--       9 deadline in s or ""  10 idempotency key or ""  11 digest of the body  12 bound per conversation  13 bound per tenant  14 traceparent
--      15 the first step's message: {step: [queue, message]} (JSON)  16 the ways in which the turn's end is told to the outside, space-separated
--      17 the caller's token, sealed, or ""  18 until when it holds (ms)
-- Returns {"new", turn, state, position, sends...} | {"interrupt", turn, state, position, running turn}
--       | {"same", turn, conversation, state, position} | {"mismatch"} | {"busy", running turn} | {"full", where}
--       | {"steered", running turn, state} | {"foreign", agent}
RING = cjson.decode(ARGV[15])
local tenant, conv, turn, request, entry, agent = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local key, ck = turn_key(tenant, turn), conv_key(tenant, conv)
local idem = ARGV[10] ~= '' and ('tm:' .. tenant .. ':idem:' .. ARGV[10]) or nil

if idem then
  local known = call('HMGET', idem, 'digest', 'turn', 'conversation', 'state', 'position')
  if known[1] then
    if known[1] ~= ARGV[11] then return { 'mismatch' } end
    return { 'same', known[2], known[3], known[4], known[5] }
  end
end
local function remember(id, state, position)
  if idem then
    call('HSET', idem, 'digest', ARGV[11], 'turn', id, 'conversation', conv, 'state', state, 'position', text(position))
    call('EXPIRE', idem, 86400)
  end
end

-- the same call again, whose answer got lost
local before, joined = fetch(key, 'state', 'joined')
if before then return { 'new', turn, before, '0' } end
if joined then return { 'steered', joined, get(turn_key(tenant, joined), 'state') or 'completed' } end

local running, seq, known_agent, created = fetch(ck, 'running', 'seq', 'agent', 'created')
local policy = ARGV[7]
if running and get(turn_key(tenant, running), 'state') == 'waiting' and ARGV[8] ~= '' then policy = ARGV[8] end
if running and policy == 'reject' then return { 'busy', running } end
if running and policy == 'steer' then
  local rk = turn_key(tenant, running)
  call('RPUSH', rk .. ':steer', entry)
  put(rk, 'steered', '1')
  bump(rk, 'v', 1)
  local state = get(rk, 'state')
  emit(tenant, running, conv, { '{"kind":"turn","turn_id":"' .. running .. '","state":"' .. state .. '","steered":true}' })
  remember(running, state, 0)
  call('HSET', key, 'joined', running)
  call('EXPIRE', key, 600)
  return { 'steered', running, state }
end
if running and call('LLEN', ck .. ':mail') >= tonumber(ARGV[12]) then return { 'full', 'conversation' } end
if running and tonumber(call('GET', 'tm:' .. tenant .. ':waiting') or '0') >= tonumber(ARGV[13]) then return { 'full', 'tenant' } end

put(key, 'req', request, 'entry', entry, 'agent', agent, 'conv', conv, 'created', text(NOW_MS), 'v', '0', 'seq0', false, 'up', false)
if ARGV[14] ~= '' then put(key, 'trace', ARGV[14]) end
if ARGV[16] ~= '' then put(key, 'tell', ARGV[16]) end
put(key, 'deadline_s', ARGV[9] ~= '' and ARGV[9])
keep_token(key, ARGV[17] ~= '' and ARGV[18], ARGV[17])
if not known_agent then put(ck, 'agent', agent) end
if not created then put(ck, 'created', text(NOW_MS)) end
if not running then
  local sends = {}
  remember(turn, 'running', 0)
  start_turn(tenant, turn, conv, sends)
  return { 'new', turn, 'running', '0', unpack(sends) }
end
put(key, 'state', 'queued')
call('INCR', 'tm:' .. tenant .. ':waiting')
local position = 1
if policy == 'interrupt' then
  call('LPUSH', ck .. ':mail', turn)
  -- durable wish: whoever dies now, the turn under way is cancelled
  call('ZADD', 'tm:due', text(NOW_MS + 1000), 'cancel:' .. tenant .. '/' .. running)
else
  position = call('RPUSH', ck .. ':mail', turn)
end
remember(turn, 'queued', position)
emit(tenant, turn, conv, { turn_frame(turn, 'queued', position) })
if policy == 'interrupt' then return { 'interrupt', turn, 'queued', '1', running } end
return { 'new', turn, 'queued', text(position) }
