-- turns.lua: a turn's beginning and end, what it used, and the turns that agents ask of one another.

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
