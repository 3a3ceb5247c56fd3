-- outbound_claim.lua: begin one attempt of a delivery; a message that comes twice or late begins nothing.
-- ARGV  1 tenant  2 delivery  3 attempt  4 claim: names the claim, so that one whose answer got lost can be asked again  5 ms it may take
--       6 who makes it: a process with a lease, or ""  7 ms until it is looked whether that one lives
-- Returns {created (ms), now (ms)} | {} when it is not to be made
local key = 'tm:' .. ARGV[1] .. ':out:' .. ARGV[2]
local state, attempt, claim, created = unpack(call('HMGET', key, 'state', 'attempt', 'claim', 'created'))
if attempt ~= ARGV[3] then return {} end
if not (state == 'running' and claim == ARGV[4]) then
  if state ~= 'sent' then return {} end
  call('HSET', key, 'state', 'running', 'claim', ARGV[4], 'process', ARGV[6], 'until', text(NOW_MS + tonumber(ARGV[5])))
end
call('ZADD', 'tm:due', text(NOW_MS + tonumber(ARGV[7])), 'out:' .. ARGV[1] .. '/' .. ARGV[2])
return { created, text(NOW_MS) }
