-- tool_claim.lua: claim one call of a tool before it runs, or learn what became of it. A claim that is sent twice is one claim.
-- Record (hash tm:idem:<hash>): state (running | done), host, nonce, args, answer. Lease (string tm:idem:host:<host>): there while the host lives.
-- ARGV  record, host, nonce, arguments' hash, may start (1 | 0), lease ms, kept s
-- Returns {"started" | "running" | "done" | "unknown" | "absent" | "mismatch", answer}
local record, host, nonce = ARGV[1], ARGV[2], ARGV[3]
local found = redis.call("HMGET", record, "state", "host", "nonce", "args", "answer")
if not found[1] then
  if ARGV[5] ~= "1" then return {"absent", ""} end
  redis.call("HSET", record, "state", "running", "host", host, "nonce", nonce, "args", ARGV[4])
  redis.call("EXPIRE", record, ARGV[7])
  redis.call("SET", "tm:idem:host:" .. host, "1", "PX", ARGV[6])
  return {"started", ""}
end
if found[4] ~= ARGV[4] then return {"mismatch", ""} end
if found[1] == "done" then return {"done", found[5] or ""} end
if found[3] == nonce then return {"started", ""} end
if redis.call("EXISTS", "tm:idem:host:" .. found[2]) == 1 then return {"running", ""} end
return {"unknown", ""}
