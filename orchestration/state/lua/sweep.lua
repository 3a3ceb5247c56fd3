-- sweep.lua: one look for everything that was left behind. Changes nothing.
-- ARGV  1 age in ms from which an unsent step is overdue  2 how many of each kind at most  3 ms after which an unclaimed step may count as lost
-- Returns {unsent steps, due entries, {process, lease's end, ...} of leases that ran out, deposed processes with steps left,
--          steps lost for certain (later ones were claimed), steps lost if their queue is empty}
local most, lost_after = tonumber(ARGV[2]), tonumber(ARGV[3])
local unsent = call('ZRANGEBYSCORE', 'tm:unsent', '-inf', text(NOW_MS - tonumber(ARGV[1])), 'LIMIT', 0, most)
local due = call('ZRANGEBYSCORE', 'tm:due', '-inf', text(NOW_MS), 'LIMIT', 0, most)
local silent = call('ZRANGEBYSCORE', 'tm:leases', '-inf', text(NOW_MS), 'WITHSCORES', 'LIMIT', 0, most)
local deposed = call('SMEMBERS', 'tm:deposed')
local lost, doubtful = {}, {}
for _, queue in ipairs({ 'plan', 'tools', 'control' }) do
  local latest = tonumber(call('HGET', 'tm:claimed', queue) or '0')
  local old = call('ZRANGEBYSCORE', 'tm:sent:' .. queue, '-inf', text(NOW_MS - lost_after), 'WITHSCORES', 'LIMIT', 0, most)
  for i = 1, #old, 2 do
    if latest >= tonumber(old[i + 1]) + lost_after then lost[#lost + 1] = old[i] else doubtful[#doubtful + 1] = old[i] end
  end
end
return { unsent, due, silent, deposed, lost, doubtful }
