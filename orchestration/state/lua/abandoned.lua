-- abandoned.lua: steps that a living process has claimed and does not work on any more; and nothing stays among its steps that is none of them.
-- ARGV  1 process  2 numbers of its claims under way (JSON list)  3 the number that its next claim had when these were listed
-- Returns for each: step, owner, attempt
local process, open, found = ARGV[1], {}, {}
if not call('ZSCORE', 'tm:leases', process) then return found end -- deposed: others pass its steps on
for _, number in ipairs(cjson.decode(ARGV[2])) do open[number] = true end
for _, name in ipairs(call('SMEMBERS', 'tm:run:' .. process)) do
  local step = parse_step(name)
  local state = fetch(step.key, 'state', step.field)
  local record = read_step(step.key, step.field)
  if not state or has_ended(state) or not record or record.state ~= 'running' or process_of(record.owner) ~= process then
    release(step, process)
  else
    local number = tonumber(string.match(record.owner, '#(%d+)$'))
    if number < tonumber(ARGV[3]) and not open[number] then
      for _, value in ipairs({ name, record.owner, text(record.attempt) }) do found[#found + 1] = value end
    end
  end
end
return found
