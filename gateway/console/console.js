// The console: lists what waits for a human, sends decisions, and shows a turn's frames as they come. Everything that somebody else wrote
// goes into the page as text, never as markup. The key stays in this tab.
"use strict";

const by = (id) => document.getElementById(id);
const KEPT_FRAMES = 2000;
let key = sessionStorage.getItem("turnmill-key") || "";
let watching = null;

function say(text) { by("status").textContent = text; }

async function api(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (key) headers["Authorization"] = "Bearer " + key;
  if (options.body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { ...options, headers, credentials: "omit" });
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({}));
  throw new Error((problem.detail || answer.statusText) + " (" + (problem.code || answer.status) + ")");
}

function pair(list, term, value) {
  if (value === null || value === undefined || value === "") return;
  const dt = document.createElement("dt");
  const dd = document.createElement("dd");
  dt.textContent = term;
  dd.textContent = String(value);
  list.append(dt, dd);
}

function card(approval) {
  const made = by("approval").content.firstElementChild.cloneNode(true);
  const find = (selector) => made.querySelector(selector);
  const shown = JSON.stringify(approval.arguments, null, 2);
  made.dataset.id = approval.approval_id;
  find("h3").textContent = approval.prefix || approval.tool;
  find(".reason").textContent = approval.reason || "";
  const facts = find("dl");
  pair(facts, "agent", approval.agent);
  pair(facts, "asked", approval.requested_at);
  pair(facts, "expires", approval.expires_at);
  pair(facts, "roles", (approval.roles || []).join(", "));
  if (approval.quorum > 1) pair(facts, "decided", (approval.decisions || []).length + " of " + approval.quorum);
  find(".arguments").value = shown;
  const decide = async (approved) => {
    const problem = find(".problem");
    const body = { approved };
    problem.textContent = "";
    if (approved && find(".arguments").value !== shown) {
      try { body.arguments = JSON.parse(find(".arguments").value); } catch (error) {
        problem.textContent = "The arguments are no JSON: " + error.message;
        return;
      }
    }
    if (find(".note").value) body.note = find(".note").value;
    for (const button of made.querySelectorAll("button")) button.disabled = true;
    try {
      const path = "/v1/approvals/" + encodeURIComponent(approval.approval_id) + "/decision";
      await api(path, { method: "POST", body: JSON.stringify(body) });
      made.remove();
      await list();
    } catch (error) {
      problem.textContent = error.message;
      for (const button of made.querySelectorAll("button")) button.disabled = false;
    }
  };
  find(".yes").addEventListener("click", () => decide(true));
  find(".no").addEventListener("click", () => decide(false));
  find(".look").addEventListener("click", () => { by("turn").value = approval.turn_id; watch(approval.turn_id); });
  return made;
}

async function list() {
  try {
    const found = await (await api("/v1/approvals?state=pending&limit=100")).json();
    const there = new Map([...by("approvals").children].map((one) => [one.dataset.id, one]));
    for (const approval of found.approvals) {
      // A card that is there stays: somebody may be typing in it.
      if (!there.delete(approval.approval_id)) by("approvals").append(card(approval));
    }
    for (const gone of there.values()) gone.remove();
    by("nothing").hidden = found.approvals.length > 0;
    by("count").textContent = found.cursor ? "100 and more" : found.approvals.length || "";
    say("");
  } catch (error) {
    say(error.message);
  }
}

function show(frame, list, answer) {
  if (frame.kind === "token") { answer.textContent += frame.text; return; }
  if (frame.kind === "retry") { answer.textContent = ""; return; }
  if (frame.kind === "message") answer.textContent = frame.content;
  const { seq, ts, kind, turn_id, round, ...rest } = frame;
  const line = document.createElement("li");
  const name = document.createElement("b");
  name.textContent = kind;
  line.className = kind === "error" || rest.error === true ? "error" : "";
  const text = JSON.stringify(rest);
  line.append(name, text === "{}" ? "" : text);
  list.append(line);
  if (list.childElementCount > KEPT_FRAMES) list.firstElementChild.remove();
}

async function follow(turn, signal) {
  const list = by("frames");
  const answer = by("answer");
  let last = "";
  while (!signal.aborted) {
    const headers = last ? { "Last-Event-ID": last } : {};
    const stream = await api("/v1/turns/" + encodeURIComponent(turn) + "/frames", { headers, signal });
    if (stream.status === 204) return;
    const reader = stream.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n");
        const id = lines.find((line) => line.startsWith("id: "));
        const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (!data) continue;
        if (id) last = id.slice(4);
        const frame = JSON.parse(data);
        show(frame, list, answer);
        if (frame.kind === "done") return;
      }
    }
    await new Promise((later) => setTimeout(later, 1000));
  }
}

async function watch(turn) {
  if (watching) watching.abort();
  const mine = watching = new AbortController();
  by("frames").replaceChildren();
  by("answer").textContent = "";
  by("cancel").disabled = false;
  try {
    await follow(turn, mine.signal);
  } catch (error) {
    if (!mine.signal.aborted) say(error.message);
  } finally {
    if (watching === mine) by("cancel").disabled = true;
  }
}

by("key").value = key;
by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = by("key").value.trim();
  sessionStorage.setItem("turnmill-key", key);
  by("approvals").replaceChildren();
  list();
});
by("turn-form").addEventListener("submit", (event) => {
  event.preventDefault();
  watch(by("turn").value.trim());
});
by("cancel").addEventListener("click", async () => {
  try {
    await api("/v1/turns/" + encodeURIComponent(by("turn").value.trim()) + "/cancel", { method: "POST" });
  } catch (error) {
    say(error.message);
  }
});
list();
setInterval(() => { if (!document.hidden) list(); }, 3000);
