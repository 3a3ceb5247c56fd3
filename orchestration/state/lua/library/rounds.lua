-- rounds.lua: what follows when a call of a round has ended.

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
