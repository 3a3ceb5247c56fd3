-- tool_look.lua: what became of several calls, without claiming any.
-- ARGV  records          Returns for each {"running" | "done" | "unknown" | "absent", answer}
local replies = {}
for index, record in ipairs(ARGV) do
  local found = redis.call("HMGET", record, "state", "host", "answer")
  if not found[1] then
    replies[index] = {"absent", ""}
  elseif found[1] == "done" then
    replies[index] = {"done", found[3] or ""}
  elseif redis.call("EXISTS", "tm:idem:host:" .. (found[2] or "")) == 1 then
    replies[index] = {"running", ""}
  else
    replies[index] = {"unknown", ""}
  end
end
return replies
