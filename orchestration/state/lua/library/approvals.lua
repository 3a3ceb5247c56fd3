-- approvals.lua: what the outside is told, the audit stream, and how a human is asked and answers.

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
