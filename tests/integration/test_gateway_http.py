"""The gateway over HTTP: what a client may rely on, against a served gateway and a real Redis."""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from gateway_stage import Served, served_gateway, until
from standardwebhooks.webhooks import Webhook as Signer

from gateway.parts import Pace
from orchestration.core.agent import Agent, StandardWebhooks, Webhook, WebhookRequest
from orchestration.core.frames import FrameKind, frame
from orchestration.core.tool import MeshTool
from orchestration.project import Project
from orchestration.testing.servers import RedisServer

SECRET = "whsec_" + base64.b64encode(b"a secret for tests only!").decode()

KEYS = json.dumps(
    [
        {"key": "key-of-the-writer-1", "sub": "ann", "tenant": "acme", "scopes": ["turns:write", "turns:read"]},
        {"key": "key-of-the-stranger", "sub": "eve", "tenant": "rival", "scopes": ["turns:write", "turns:read", "approvals:read"]},
        {"key": "key-of-the-reader-1", "sub": "bob", "tenant": "acme", "scopes": ["turns:read"]},
    ]
)


class Silent:
    """A model that is never asked here."""

    model = "silent"

    def complete(self, messages: Any, *, tools: Any = None) -> Any:
        raise AssertionError("no worker runs in these tests")


def to_turn(request: WebhookRequest) -> dict[str, Any] | None:
    if request.json["type"] == "ping":
        return None
    return {"input": request.json["text"], "conversation_id": request.json.get("from")}


def project() -> Project:
    agent = Agent("support", Silent(), tools=[MeshTool("billing/refund", approval="money moves")], description="answers customers")
    hook = Webhook("shop", "support", StandardWebhooks("SHOP_SECRET"), "shop-bot", "acme", to_turn)
    return Project(agents={"support": agent}, webhooks={"shop": hook})


@pytest.fixture(scope="module")
def gateway(turnmill_redis: RedisServer) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOP_SECRET", SECRET)
        with served_gateway(turnmill_redis.url, project(), max_body_bytes=100_000) as served:
            yield served


@pytest.fixture(scope="module")
def keyed(turnmill_redis: RedisServer) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOP_SECRET", SECRET)
        with served_gateway(turnmill_redis.url, project(), api_keys=KEYS) as served:
            yield served


def submitted(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.client.post("/v1/agents/support/turns", json={"input": "hello", **body})
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    body = answer.json()
    assert (body["status"], body["code"]) == (status, code)
    assert body["title"] and body["type"]
    return dict(body)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    found = []
    for block in answer.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if fields:
            found.append({"id": fields.get("id"), "event": fields["event"], **json.loads(fields["data"])})
    return found


# Turns


def test_a_turn_is_submitted_read_and_cancelled(gateway: Served) -> None:
    answer = gateway.client.post("/v1/agents/support/turns", json={"input": "hello", "metadata": {"ticket": 7}})
    made = answer.json()
    assert answer.headers["location"] == f"/v1/turns/{made['turn_id']}"
    assert set(made) == {"turn_id", "conversation_id", "state", "position"}
    turn = gateway.client.get(f"/v1/turns/{made['turn_id']}").json()
    assert (turn["agent"], turn["state"], turn["metadata"]) == ("support", "running", {"ticket": 7})
    ended = gateway.client.post(f"/v1/turns/{made['turn_id']}/cancel")
    assert (ended.status_code, ended.json()["state"], ended.json()["stop_reason"]) == (200, "cancelled", "cancelled")
    problem(gateway.client.post(f"/v1/turns/{made['turn_id']}/cancel"), 409, "turn_ended")


def test_the_same_key_with_the_same_body_is_the_same_turn(gateway: Served) -> None:
    def post(text: str) -> httpx.Response:
        return gateway.client.post("/v1/agents/support/turns", json={"input": text}, headers={"Idempotency-Key": "once"})

    first = post("once")
    assert post("once").json() == first.json()
    problem(post("twice"), 409, "idempotency_mismatch")


def test_a_busy_conversation_queues_or_rejects(gateway: Served) -> None:
    first = submitted(gateway)
    waiting = submitted(gateway, conversation_id=first["conversation_id"])
    assert (waiting["state"], waiting["position"]) == ("queued", 1)
    body = {"input": "x", "conversation_id": first["conversation_id"], "on_busy": "reject"}
    problem(gateway.client.post("/v1/agents/support/turns", json=body), 409, "conversation_busy")


def test_content_parts_are_taken_and_checked(gateway: Served) -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
    submitted(gateway, input=parts)
    answer = gateway.client.post("/v1/agents/support/turns", json={"input": [{"type": "SECRET-TYPE", "text": "x"}]})
    body = problem(answer, 422, "validation_error")
    assert body["errors"][0]["loc"][:2] == ["body", "input"]
    assert "SECRET-TYPE" not in answer.text


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": 7}, "input"),
        ({"input": []}, "input"),
        ({"input": "x", "conversation_id": "not an id"}, "conversation_id"),
        ({"input": "x", "conversation_id": "a" * 65}, "conversation_id"),
        ({"input": "x", "on_busy": "shove"}, "on_busy"),
        ({"input": "x", "deadline_s": 0}, "deadline_s"),
        ({"input": "x", "deadline_s": 10**90}, "deadline_s"),
        ({"input": "x", "deadline_s": True}, "deadline_s"),
        ({"input": "x", "metadata": []}, "metadata"),
        ({"input": "x", "callback_url": "ftp://example.com/x"}, "callback_url"),
        ({"input": "x", "surprise": 1}, "surprise"),
        ([], ""),
        ("text", ""),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(gateway: Served, body: Any, where: str) -> None:
    told = problem(gateway.client.post("/v1/agents/support/turns", json=body), 422, "validation_error")
    assert any(where in error["loc"] for error in told["errors"]) or not where
    assert all(set(error) == {"loc", "msg"} for error in told["errors"])


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b'{"input": ', 400, "bad_request"),
        (b"", 422, "validation_error"),
        (b"\xff\xfe\x00", 400, "bad_request"),
        (b'{"input": "\xc3\x28"}', 400, "bad_request"),
        (b'{"input": "x", "deadline_s": NaN}', 400, "bad_request"),
        (b'{"input": "x", "deadline_s": -Infinity}', 400, "bad_request"),
        (b'{"input": "x", "deadline_s": 1e999}', 400, "bad_request"),
        (b'{"input": "x", "metadata": {"n": ' + b"9" * 5000 + b"}}", 400, "bad_request"),
        (b'{"input": "x", "input": "y"}', 400, "bad_request"),
        (b'{"input": "\\ud800"}', 422, "validation_error"),
        (b'{"input": "x", "metadata": {"\\udc00": 1}}', 422, "validation_error"),
        (b"[" * 40_000, 400, "bad_request"),
        (b'{"input": "x", "metadata": ' + b'{"a":' * 300 + b"1" + b"}" * 301, 400, "bad_request"),
        (b"\xef\xbb\xbf{}", 400, "bad_request"),
    ],
)
def test_a_broken_body_gets_a_clear_answer(gateway: Served, content: bytes, status: int, code: str) -> None:
    answer = gateway.client.post("/v1/agents/support/turns", content=content, headers={"Content-Type": "application/json"})
    problem(answer, status, code)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:6379/",
        "http://169.254.169.254/",
        "http://[::1]/",
        "http://[::ffff:10.0.0.5]/",
        "http://10.0.0.5/",
        "http://localhost/",
        "ftp://x/",
        "http://u:p@example.com/",
    ],
)
def test_a_callback_into_the_inside_is_refused_with_a_reason(gateway: Served, url: str) -> None:
    told = problem(gateway.client.post("/v1/agents/support/turns", json={"input": "x", "callback_url": url}), 422, "validation_error")
    assert any("callback_url" in error["loc"] for error in told["errors"])


def test_only_json_is_taken_as_json(gateway: Served) -> None:
    answer = gateway.client.post("/v1/agents/support/turns", content=b'{"input": "x"}', headers={"Content-Type": "text/plain"})
    problem(answer, 415, "unsupported_media_type")
    assert gateway.client.post("/v1/agents/support/turns", content=b'{"input": "x"}').status_code == 202


def test_odd_text_passes_unharmed(gateway: Served) -> None:
    text = "nul \x00, bell \x07, 🦊, \u2028, \ufeff, <script>"
    made = submitted(gateway, input=text)
    history = gateway.client.get(f"/v1/conversations/{made['conversation_id']}/history").json()["history"]
    assert history[0]["data"] == text


def test_a_body_over_the_limit_is_refused(gateway: Served) -> None:
    problem(gateway.client.post("/v1/agents/support/turns", json={"input": "x" * 200_000}), 413, "too_large")
    answer = gateway.client.post("/v1/agents/support/turns", content=iter([b'{"input": "', b"x" * 60_000, b"x" * 60_000]))
    problem(answer, 413, "too_large")


def test_a_body_over_the_limit_is_refused_before_it_is_sent(gateway: Served) -> None:
    url = httpx.URL(gateway.url)
    with socket.create_connection((url.host, url.port or 80), 10) as raw:
        raw.sendall(b"POST /v1/agents/support/turns HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
        answer = b""
        while chunk := raw.recv(4096):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"too_large"' in answer


def test_what_is_not_there_is_404_in_one_form(gateway: Served) -> None:
    problem(gateway.client.post("/v1/agents/nobody/turns", json={"input": "x"}), 404, "unknown_agent")
    problem(gateway.client.get("/v1/agents/no%20body"), 404, "unknown_agent")
    for path in (
        "/v1/turns/tn_none",
        "/v1/turns/%00",
        "/v1/turns/a:b",
        "/v1/conversations/cv_none",
        "/v1/approvals/ap_none",
        "/v1/turns/tn_x/frames",
    ):
        problem(gateway.client.get(path), 404, "not_found")
    problem(gateway.client.get("/v1/nothing"), 404, "not_found")
    problem(gateway.client.get("/v1/agents/"), 404, "not_found")
    refused = gateway.client.put("/v1/agents")
    problem(refused, 405, "method_not_allowed")
    assert refused.headers["allow"] == "GET"
    assert gateway.client.put("/v1/conversations/cv_none").headers["allow"] == "DELETE, GET"
    assert gateway.client.put("/v1/approvals/ap_none/link").headers["allow"] == "GET, POST"


def test_agents_show_their_tools_and_gates(gateway: Served) -> None:
    (agent,) = gateway.client.get("/v1/agents").json()["agents"]
    assert agent == gateway.client.get("/v1/agents/support").json()
    assert (agent["name"], agent["description"]) == ("support", "answers customers")
    assert agent["tools"][0]["name"] == "billing-refund"
    assert agent["tools"][0]["approval"]["reason"] == "money moves"
    assert re.fullmatch(r"[0-9a-f]{16,64}", agent["snapshot"])


def test_a_wait_ends_with_the_turn(gateway: Served) -> None:
    conversation = submitted(gateway)["conversation_id"]
    running = gateway.client.get(f"/v1/conversations/{conversation}").json()["running_turn_id"]
    gateway.client.post(f"/v1/turns/{running}/cancel")
    answers: list[httpx.Response] = []

    def wait() -> None:
        body = {"input": "and now?", "conversation_id": conversation}
        answers.append(httpx.post(f"{gateway.url}/v1/agents/support/turns", json=body, headers={"Prefer": "wait=60"}, timeout=90))

    waiter = threading.Thread(target=wait)
    waiter.start()
    until(lambda: gateway.watching == 1, "the wait to begin")
    running = gateway.client.get(f"/v1/conversations/{conversation}").json()["running_turn_id"]
    gateway.client.post(f"/v1/turns/{running}/cancel")
    waiter.join()
    assert (answers[0].status_code, answers[0].json()["state"]) == (200, "cancelled")
    assert answers[0].headers["preference-applied"] == "wait=60"
    until(lambda: gateway.watching == 0, "the wait to leave nothing behind")


def test_a_wait_that_is_too_short_says_that_the_turn_still_runs(gateway: Served) -> None:
    answer = gateway.client.post("/v1/agents/support/turns", json={"input": "x"}, headers={"Prefer": "respond-async, wait=1"})
    assert (answer.status_code, answer.json()["state"]) == (202, "running")


# Frames


def test_a_turn_is_watched_live_to_its_end_and_resumed_by_number(gateway: Served) -> None:
    made = submitted(gateway)
    with gateway.client.stream("GET", f"/v1/turns/{made['turn_id']}/frames") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.headers["x-accel-buffering"] == "no"
        assert stream.headers["cache-control"] == "no-cache, no-transform"
        until(lambda: gateway.watching == 1, "the watcher")
        gateway.hand.write(made["conversation_id"], made["turn_id"], "line one\nline two \u2028 end")
        gateway.client.post(f"/v1/turns/{made['turn_id']}/cancel")
        stream.read()
    told = events(stream)
    assert [one["event"] for one in told] == ["turn", "token", "done"]
    assert told[1]["text"] == "line one\nline two \u2028 end"
    assert all(one["id"] == str(one["seq"]) and one["turn_id"] == made["turn_id"] and one["ts"].endswith("Z") for one in told)
    until(lambda: gateway.watching == 0, "the watcher to leave nothing behind")

    def after(number: str) -> httpx.Response:
        return gateway.client.get(f"/v1/turns/{made['turn_id']}/frames", headers={"Last-Event-ID": number})

    assert events(after(told[0]["id"])) == told[1:]
    assert events(after("")) == told
    assert after(told[-1]["id"]).status_code == 204
    gap, done = events(after("9" * 18))
    assert (gap["event"], gap["id"], gap["from"]) == ("gap", None, int(told[-1]["id"]) + 1)
    assert done == told[-1]
    for wrong in ("-1", "0", "abc", "1.5", "0x10", "1 2", "+3"):
        problem(after(wrong), 400, "bad_event_id")


def test_a_conversation_is_watched_across_its_turns(gateway: Served) -> None:
    first = submitted(gateway)
    second = submitted(gateway, conversation_id=first["conversation_id"])
    with gateway.client.stream("GET", f"/v1/conversations/{first['conversation_id']}/frames") as stream:
        lines = stream.iter_lines()
        gateway.client.post(f"/v1/turns/{first['turn_id']}/cancel")
        seen: list[dict[str, Any]] = []
        while len(seen) < 4:
            line = next(lines)
            if line.startswith("data: "):
                seen.append(json.loads(line[6:]))
    assert [(one["kind"], one.get("state")) for one in seen] == [
        ("turn", "running"),
        ("turn", "queued"),
        ("done", None),
        ("turn", "running"),
    ]
    assert {one["turn_id"] for one in seen} == {first["turn_id"], second["turn_id"]}
    until(lambda: gateway.watching == 0, "the watcher to be gone")


def test_silence_is_filled_with_comments_and_an_unread_stream_is_cut(turnmill_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_SECRET", SECRET)
    with served_gateway(turnmill_redis.url, project(), pace=Pace(comment_s=0.1, send_s=0.5)) as gateway:
        made = submitted(gateway)
        with gateway.client.stream("GET", f"/v1/turns/{made['turn_id']}/frames") as stream:
            assert any(line.startswith(":") for line in stream.iter_lines())
        until(lambda: gateway.watching == 0, "the client's departure to be seen")
        url = httpx.URL(gateway.url)
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((url.host, url.port))
            raw.sendall(f"GET /v1/turns/{made['turn_id']}/frames HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            until(lambda: gateway.watching == 1, "the watcher")
            end = time.monotonic() + 60
            while gateway.watching and time.monotonic() < end:
                gateway.hand.write(made["conversation_id"], made["turn_id"], "x" * 100_000)
            assert gateway.watching == 0


def test_a_stopping_gateway_ends_its_streams(turnmill_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_SECRET", SECRET)
    with served_gateway(turnmill_redis.url, project()) as gateway:
        made = submitted(gateway)
        with gateway.client.stream("GET", f"/v1/conversations/{made['conversation_id']}/frames") as stream:
            until(lambda: gateway.watching == 1, "the watcher")
            gateway.app.state.parts.hub.stop()
            stream.read()
        assert events(stream)[0]["event"] == "turn"


# Conversations and approvals


def test_a_conversation_is_read_and_deleted(gateway: Served) -> None:
    made = submitted(gateway, input="remember me")
    path = f"/v1/conversations/{made['conversation_id']}"
    assert gateway.client.get(path).json()["running_turn_id"] == made["turn_id"]
    problem(gateway.client.delete(path), 409, "conversation_busy")
    gateway.client.post(f"/v1/turns/{made['turn_id']}/cancel")
    (entry,) = gateway.client.get(f"{path}/history", params={"limit": 1, "before": 1}).json()["history"]
    assert (entry["dir"], entry["data"]) == ("in", "remember me")
    problem(gateway.client.get(f"{path}/history", params={"limit": 0}), 422, "validation_error")
    assert gateway.client.delete(path).status_code == 204
    problem(gateway.client.get(path), 404, "not_found")


def test_approvals_are_listed_and_refuse_what_is_no_decision(gateway: Served) -> None:
    assert set(gateway.client.get("/v1/approvals", params={"state": "pending", "limit": 5}).json()) == {"approvals", "cursor"}
    problem(gateway.client.get("/v1/approvals", params={"state": "lost"}), 422, "validation_error")
    problem(gateway.client.post("/v1/approvals/ap_none/decision", json={"approved": True}), 404, "not_found")
    for body in (
        {},
        {"approved": "true"},
        {"approved": 1},
        {"approved": None},
        {"approved": True, "arguments": []},
        {"approved": True, "x": 1},
    ):
        problem(gateway.client.post("/v1/approvals/ap_none/decision", json=body), 422, "validation_error")
    twice = b'{"approved": false, "approved": true}'
    problem(gateway.client.post("/v1/approvals/ap_none/decision", content=twice), 400, "bad_request")


# Who asks


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_with_keys_nobody_comes_in_without_one(keyed: Served) -> None:
    for path in ("/v1/agents", "/v1/turns/tn_x", "/v1/approvals", "/v1/turns/tn_x/frames"):
        refused = keyed.client.get(path)
        problem(refused, 401, "unauthorized")
        assert refused.headers["www-authenticate"] == "Bearer"
    for header in ("Bearer", "Basic a2V5", "Bearer wrong-key-of-nobody", "key-of-the-writer-1", "Bearer " + "x" * 9000):
        problem(keyed.client.get("/v1/agents", headers={"Authorization": header}), 401, "unauthorized")
    assert keyed.client.get("/v1/agents", headers=bearer("key-of-the-reader-1")).status_code == 200
    assert keyed.client.get("/healthz").status_code == 200


def test_a_scope_is_needed_for_what_it_names(keyed: Served) -> None:
    answer = keyed.client.post("/v1/agents/support/turns", json={"input": "x"}, headers=bearer("key-of-the-reader-1"))
    assert "turns:write" in problem(answer, 403, "forbidden")["detail"]
    problem(keyed.client.get("/v1/approvals", headers=bearer("key-of-the-reader-1")), 403, "forbidden")
    problem(
        keyed.client.post("/v1/approvals/ap_x/decision", json={"approved": True}, headers=bearer("key-of-the-stranger")), 403, "forbidden"
    )


def test_what_another_tenant_owns_is_not_there(keyed: Served) -> None:
    made = keyed.client.post("/v1/agents/support/turns", json={"input": "mine"}, headers=bearer("key-of-the-writer-1")).json()
    stranger = bearer("key-of-the-stranger")
    turn, conversation = f"/v1/turns/{made['turn_id']}", f"/v1/conversations/{made['conversation_id']}"
    for path in (turn, f"{turn}/frames", conversation, f"{conversation}/history", f"{conversation}/frames"):
        problem(keyed.client.get(path, headers=stranger), 404, "not_found")
    problem(keyed.client.post(f"{turn}/cancel", headers=stranger), 404, "not_found")
    problem(keyed.client.delete(conversation, headers=stranger), 404, "not_found")
    assert keyed.client.get(turn, headers=bearer("key-of-the-reader-1")).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "10.0.0.7:8000"},
        {"Host": "[::1"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"X-Forwarded-For": "203.0.113.7"},
        {"Forwarded": "for=203.0.113.7"},
        {"X-Forwarded-Proto": "https"},
        {"Via": "1.1 tunnel"},
        {"CF-Connecting-IP": "203.0.113.7"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_without_keys_only_this_machine_is_served(gateway: Served, headers: dict[str, str]) -> None:
    problem(gateway.client.get("/v1/agents", headers=headers), 401, "unauthorized")


def test_without_keys_a_local_page_is_served(gateway: Served) -> None:
    for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:9", "LOCALHOST."):
        assert gateway.client.get("/v1/agents", headers={"Host": host, "Origin": "http://localhost:3000"}).status_code == 200


# Webhooks in


def signed(body: bytes, delivery: str = "msg_1", *, secret: str = SECRET, age_s: float = 0) -> dict[str, str]:
    at = datetime.fromtimestamp(int(time.time() - age_s), UTC)
    signature = Signer(secret).sign(delivery, at, body.decode("latin-1"))
    return {"webhook-id": delivery, "webhook-timestamp": str(int(at.timestamp())), "webhook-signature": signature}


def test_a_repeated_delivery_is_the_same_turn(keyed: Served) -> None:
    body = json.dumps({"type": "message", "text": "my parcel?", "from": "+49 30 1234"}).encode()
    first = keyed.client.post("/v1/webhooks/shop", content=body, headers=signed(body, "msg_a"))
    again = keyed.client.post("/v1/webhooks/shop", content=body, headers=signed(body, "msg_a", age_s=5))
    other = keyed.client.post("/v1/webhooks/shop", content=body, headers=signed(body, "msg_b"))
    assert (first.status_code, again.status_code, other.status_code) == (202, 202, 202)
    assert first.json() == again.json()
    assert first.json()["turn_id"] != other.json()["turn_id"]
    assert first.json()["conversation_id"] == other.json()["conversation_id"]
    turn = keyed.client.get(f"/v1/turns/{first.json()['turn_id']}", headers=bearer("key-of-the-reader-1")).json()
    assert turn["agent"] == "support"


def test_an_unproven_delivery_changes_nothing(keyed: Served) -> None:
    body = json.dumps({"type": "message", "text": "SECRET-TEXT"}).encode()
    good = signed(body, "msg_c")
    wrong = [
        {},
        {**good, "webhook-signature": "v1,AAAA"},
        {**good, "webhook-signature": "nonsense"},
        {**good, "webhook-signature": "v1"},
        {**good, "webhook-signature": good["webhook-signature"].replace("v1,", "v2,")},
        {**good, "webhook-id": "msg_d"},
        {**good, "webhook-timestamp": "soon"},
        {**good, "webhook-timestamp": str(int(good["webhook-timestamp"]) + 1)},
        signed(body, "msg_c", age_s=301),
        signed(body, "msg_c", age_s=-400),
        signed(body, "msg_c", secret="whsec_" + base64.b64encode(b"another secret").decode()),
    ]
    for headers in wrong:
        refused = keyed.client.post("/v1/webhooks/shop", content=body, headers=headers)
        problem(refused, 401, "bad_signature")
        assert "SECRET-TEXT" not in refused.text
    problem(keyed.client.post("/v1/webhooks/shop", content=body + b" ", headers=good), 401, "bad_signature")


def test_one_of_several_signatures_is_enough(keyed: Served) -> None:
    body = json.dumps({"type": "message", "text": "changing secrets"}).encode()
    headers = signed(body, "msg_e")
    headers["webhook-signature"] = f"v1a,xyz broken v1,!!! {headers['webhook-signature']}"
    assert keyed.client.post("/v1/webhooks/shop", content=body, headers=headers).status_code == 202


def test_a_delivery_that_means_no_turn_or_cannot_be_read(keyed: Served) -> None:
    def deliver(body: bytes, delivery: str) -> httpx.Response:
        return keyed.client.post("/v1/webhooks/shop", content=body, headers=signed(body, delivery))

    assert deliver(b'{"type": "ping"}', "msg_f").status_code == 204
    for place, body in enumerate(
        (b"not json", b"{}", b"[1]", b'{"type": "message", "text": ""}', b'{"type": "message", "text": "\\ud800"}', b"")
    ):
        assert deliver(body, f"msg_g{place}").status_code in (400, 422)
    problem(keyed.client.post("/v1/webhooks/nobody", content=b"{}"), 404, "not_found")


# When the store is away


def test_nothing_is_accepted_that_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_SECRET", SECRET)
    with RedisServer(appendonly="always") as server, served_gateway(server.url, project(), api_keys=KEYS) as gateway:
        writer = bearer("key-of-the-writer-1")
        made = gateway.client.post("/v1/agents/support/turns", json={"input": "before"}, headers=writer).json()
        server.shut_down()
        for answer in (
            gateway.client.post("/v1/agents/support/turns", json={"input": "during"}, headers=writer),
            gateway.client.get(f"/v1/turns/{made['turn_id']}", headers=writer),
            gateway.client.get(f"/v1/turns/{made['turn_id']}/frames", headers=writer),
            gateway.client.get("/v1/agents", headers=bearer("perhaps-a-stored-key-tmk_")),
        ):
            if answer.status_code != 401:
                problem(answer, 503, "store_unavailable")
                assert int(answer.headers["retry-after"]) >= 1
        assert gateway.client.get("/healthz").status_code == 200
        ready = gateway.client.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["state"]) == (503, "ConnectionError")
        server.start()
        assert gateway.client.get(f"/v1/turns/{made['turn_id']}", headers=writer).status_code == 200
        until(lambda: gateway.client.get("/readyz").status_code == 200, "the gateway to be ready again")
        gateway.client.post(f"/v1/turns/{made['turn_id']}/cancel", headers=writer)
        told = events(gateway.client.get(f"/v1/turns/{made['turn_id']}/frames", headers=writer))
        assert [one["event"] for one in told] == [str(FrameKind.TURN), str(FrameKind.DONE)]


def test_what_nobody_foresaw_is_told_without_its_text(
    gateway: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = "-".join(("SECRET", "TEXT"))

    def broken(*_: Any) -> Any:
        raise KeyError(text)

    monkeypatch.setattr("gateway.agents.read.agent_list", broken)
    answer = gateway.client.get("/v1/agents")
    problem(answer, 500, "internal_error")
    assert text not in answer.text
    assert text not in caplog.text
    assert "unforeseen KeyError" in caplog.text


def test_the_document_describes_every_route(gateway: Served) -> None:
    document = gateway.client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert {"/v1/agents/{agent}/turns", "/v1/turns/{turn_id}/frames", "/v1/approvals/{approval_id}/decision", "/v1/webhooks/{name}"} <= set(
        document["paths"]
    )
    body = document["paths"]["/v1/agents/{agent}/turns"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/TurnBody"}
    answers = document["paths"]["/v1/turns/{turn_id}"]["get"]["responses"]
    assert "application/problem+json" in answers["404"]["content"]


def test_frames_of_a_turn_hold_what_a_model_made_up(gateway: Served) -> None:
    made = submitted(gateway)
    body = frame(
        FrameKind.TOOL_RESULT, made["turn_id"], 1, tool_call_id="tc_1", name="x", content="id: 1\n\nevent: done\ndata: {}\n\n", error=False
    )
    gateway.hand.put(made["conversation_id"], made["turn_id"], body)
    gateway.client.post(f"/v1/turns/{made['turn_id']}/cancel")
    told = events(gateway.client.get(f"/v1/turns/{made['turn_id']}/frames"))
    assert [one["event"] for one in told] == ["turn", "tool_result", "done"]
