-- tool_finish.lua: record the answer of a call that ran; the first answer stays. "release" forgets a claim whose call did not run.
-- ARGV  record, "done" | "release", nonce, answer, arguments' hash, kept s
-- Returns "recorded" | "already" | "released"
local record = ARGV[1]
local found = redis.call("HMGET", record, "state", "nonce")
if ARGV[2] == "release" then
  if found[1] == "running" and found[2] == ARGV[3] then redis.call("DEL", record) end
  return "released"
end
if found[1] == "done" then return "already" end
redis.call("HSET", record, "state", "done", "answer", ARGV[4], "args", ARGV[5])
redis.call("EXPIRE", record, ARGV[6])
return "recorded"
