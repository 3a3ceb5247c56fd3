"""Approvals over HTTP on a real Redis: decisions at once, expiry, links in a browser, the audit stream, the command line, and callbacks."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from standardwebhooks import Webhook as Verifier
from typer.testing import CliRunner

from orchestration import Agent, Gate, Limits
from orchestration.core.outbound import Delivery, OutboundEvent, Way
from orchestration.outbound.address import check_url
from orchestration.outbound.signing import secrets_of
from orchestration.project import collect
from orchestration.testing.local import LocalMesh
from orchestration.testing.servers import RedisServer
from tests.fixtures.approvals import Refunds, ran, refund
from tests.integration.gateway_stage import Served, served_gateway, until
from workers.cli import app as command

DECIDER = ["approvals:read", "approvals:decide"]

KEYS: list[dict[str, Any]] = [
    {
        "key": "key-of-the-submitter",
        "sub": "sue",
        "tenant": "acme",
        "scopes": ["turns:write", "turns:read", "approvals:decide"],
        "roles": ["ops"],
    },
    {"key": "key-of-ann-0123456789", "sub": "ann", "tenant": "acme", "scopes": DECIDER, "roles": ["ops"]},
    {"key": "key-of-bob-0123456789", "sub": "bob", "tenant": "acme", "scopes": DECIDER, "roles": ["ops"]},
    {"key": "key-of-lea-0123456789", "sub": "lea", "tenant": "acme", "scopes": DECIDER, "roles": ["lead"]},
    {"key": "key-of-the-admin-0123", "sub": "root", "tenant": "acme", "scopes": [*DECIDER, "admin"], "roles": ["ops"]},
    {"key": "key-of-the-stranger-0", "sub": "eve", "tenant": "rival", "scopes": [*DECIDER, "admin"], "roles": ["ops"]},
]

AS = {one["sub"]: {"Authorization": f"Bearer {one['key']}"} for one in KEYS}

GATES = {
    "plain": Gate(roles=["ops"]),
    "short": Gate(timeout_s=0.3),
    "holding": Gate(timeout_s=0.3, on_expiry="hold"),
    "ending": Gate(timeout_s=0.3, on_expiry="end_turn"),
    "escalating": Gate(timeout_s=0.3, roles=["ops"], on_expiry="escalate", escalate_to=["lead"], escalate_timeout_s=600),
    "reminding": Gate(timeout_s=600, remind_before_s=599.9),
    "two": Gate(quorum=2),
    "careful": Gate(four_eyes=True),
}

hook_heard: list[dict[str, Any]] = []


def on_approval_request(approval: dict[str, Any]) -> None:
    hook_heard.append(approval)


@pytest.fixture(scope="module")
def gateway(turnmill_redis: RedisServer) -> Iterator[Served]:
    agents = [Agent(name, Refunds(), tools=[refund], approvals={"billing/refund": gate}) for name, gate in GATES.items()]
    agents.append(Agent("hurried", Refunds(), tools=[refund], limits=Limits(deadline_s=0.3)))
    project = collect([*agents, refund], "this test")
    object.__setattr__(project, "on_approval_request", on_approval_request)
    settings: dict[str, Any] = {"api_keys": json.dumps(KEYS), "callback_networks": ["127.0.0.0/8"], "rate_per_s": 0}
    with served_gateway(turnmill_redis.url, project, working=True, mesh=LocalMesh([refund]), **settings) as served:
        yield served


@pytest.fixture(autouse=True)
def empty_ledger() -> None:
    ran.clear()


def submit(gateway: Served, agent: str = "plain", **more: Any) -> str:
    answer = gateway.client.post(f"/v1/agents/{agent}/turns", json={"input": "refund", **more}, headers=AS["sue"])
    assert answer.status_code == 202, answer.text
    return str(answer.json()["turn_id"])


def turn(gateway: Served, turn_id: str) -> dict[str, Any]:
    found: dict[str, Any] = gateway.client.get(f"/v1/turns/{turn_id}", headers=AS["sue"]).json()
    return found


def waiting(gateway: Served, agent: str = "plain", **more: Any) -> tuple[str, str]:
    """A turn that waits, and its approval."""
    turn_id = submit(gateway, agent, **more)
    until(lambda: turn(gateway, turn_id)["calls"], "the call to be asked for")
    return turn_id, str(turn(gateway, turn_id)["calls"][0]["approval_id"])


def ended(gateway: Served, turn_id: str) -> dict[str, Any]:
    until(lambda: turn(gateway, turn_id)["ended_at"], "the turn to end")
    return turn(gateway, turn_id)


def read(gateway: Served, id_: str, who: str = "ann") -> httpx.Response:
    return gateway.client.get(f"/v1/approvals/{id_}", headers=AS[who])


def decide(gateway: Served, id_: str, approved: bool, who: str = "ann", **more: Any) -> httpx.Response:
    return gateway.client.post(f"/v1/approvals/{id_}/decision", json={"approved": approved, **more}, headers=AS[who])


def frames(gateway: Served, turn_id: str, kind: str) -> list[dict[str, Any]]:
    with gateway.client.stream("GET", f"/v1/turns/{turn_id}/frames", headers=AS["sue"]) as stream:
        found = [json.loads(line[5:]) for line in stream.iter_lines() if line.startswith("data:")]
    return [frame for frame in found if frame["kind"] == kind]


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_two_people_decide_at_once_and_one_decision_holds(gateway: Served) -> None:
    for _ in range(5):
        ran.clear()
        turn_id, id_ = waiting(gateway)
        with ThreadPoolExecutor(20) as pool:
            yes = [pool.submit(decide, gateway, id_, True, "ann") for _ in range(10)]
            no = [pool.submit(decide, gateway, id_, False, "bob") for _ in range(10)]
        answers = [(True, one.result()) for one in yes] + [(False, one.result()) for one in no]
        approved = read(gateway, id_).json()["state"] == "approved"
        for said, answer in answers:
            if said is approved:
                assert answer.status_code == 200 and answer.json()["state"] == ("approved" if approved else "denied")
            else:
                assert problem(answer, 409, "already_decided")["approval"]["state"] == ("approved" if approved else "denied")
        assert ended(gateway, turn_id)["calls"][0]["state"] == ("completed" if approved else "denied")
        assert len(frames(gateway, turn_id, "approval_decision")) == 1
        assert len(ran) == (1 if approved else 0)


def test_a_decision_against_the_expiry_at_the_same_instant_has_one_winner(gateway: Served) -> None:
    for _ in range(6):
        ran.clear()
        turn_id, id_ = waiting(gateway, "short")
        expires = gateway.ports.approvals.get("acme", id_).expires_at
        while gateway.ports.approvals.now_ms() < expires - 5:
            pass
        answer = decide(gateway, id_, True)
        found = ended(gateway, turn_id)
        if answer.status_code == 200:
            assert found["calls"][0]["state"] == "completed" and len(ran) == 1
        else:
            problem(answer, 410, "approval_expired")
            assert found["calls"][0]["state"] == "expired" and ran == []


def test_a_decision_against_a_cancel_has_one_winner(gateway: Served) -> None:
    for _ in range(6):
        ran.clear()
        turn_id, id_ = waiting(gateway)
        with ThreadPoolExecutor(2) as pool:
            cancelled = pool.submit(gateway.client.post, f"/v1/turns/{turn_id}/cancel", headers=AS["sue"])
            decided = pool.submit(decide, gateway, id_, True)
        assert cancelled.result().status_code in (200, 409)
        found = ended(gateway, turn_id)
        told = audit(gateway, approval_id=id_)[1]
        assert told["from"] == "rest:127.0.0.1" and told["by"] == ("sue" if told["event"] == "cancelled" else "ann")
        state = read(gateway, id_).json()["state"]
        if decided.result().status_code == 200:
            assert state == "approved"
        else:
            problem(decided.result(), 410, "approval_cancelled")
            assert state == "cancelled" and ran == [] and found["state"] == "cancelled"
        assert len(ran) <= 1


def test_an_expired_approval_is_over_within_moments_and_says_so(gateway: Served) -> None:
    turn_id, id_ = waiting(gateway, "short")
    found = ended(gateway, turn_id)
    assert found["state"] == "completed" and found["calls"][0]["state"] == "expired" and "in time" in found["answer"]
    problem(decide(gateway, id_, True), 410, "approval_expired")
    assert ran == []


def test_a_gate_can_end_the_turn(gateway: Served) -> None:
    found = ended(gateway, submit(gateway, "ending"))
    assert (found["state"], found["stop_reason"], found["error"]["code"]) == ("failed", "approval_expired", "approval_expired")


def test_a_held_approval_waits_until_somebody_reopens_it(gateway: Served) -> None:
    turn_id, id_ = waiting(gateway, "holding")
    until(lambda: read(gateway, id_).json()["state"] == "held", "it to be held")
    listed = gateway.client.get("/v1/approvals", params={"state": "held"}, headers=AS["ann"]).json()["approvals"]
    assert id_ in [one["approval_id"] for one in listed]
    problem(decide(gateway, id_, True), 410, "approval_expired")
    problem(gateway.client.post(f"/v1/approvals/{id_}/reopen", json={"timeout_s": 0}, headers=AS["ann"]), 422, "validation_error")
    assert gateway.client.post(f"/v1/approvals/{id_}/reopen", json={"timeout_s": 600}, headers=AS["ann"]).json()["state"] == "pending"
    problem(gateway.client.post(f"/v1/approvals/{id_}/reopen", headers=AS["ann"]), 409, "not_held")
    assert decide(gateway, id_, True).status_code == 200
    assert ended(gateway, turn_id)["state"] == "completed" and len(ran) == 1


def test_an_escalated_approval_asks_others_under_an_id_of_its_own(gateway: Served) -> None:
    turn_id, first = waiting(gateway, "escalating")
    until(lambda: read(gateway, first).json()["escalated_to"], "the escalation")
    second = read(gateway, first).json()["escalated_to"]
    assert read(gateway, second).json()["escalated_from"] == first
    problem(decide(gateway, second, True, "ann"), 403, "forbidden")
    assert decide(gateway, second, True, "lea").status_code == 200
    assert ended(gateway, turn_id)["calls"][0]["state"] == "completed"


def test_a_reminder_is_a_frame(gateway: Served) -> None:
    turn_id, id_ = waiting(gateway, "reminding")
    until(lambda: any(entry["event"] == "reminded" for entry in audit(gateway, approval_id=id_)), "the reminder")
    decide(gateway, id_, False)
    ended(gateway, turn_id)
    assert [frame.get("reminder", False) for frame in frames(gateway, turn_id, "approval_request")] == [False, True]


def test_a_turns_deadline_does_not_run_while_a_human_is_asked(gateway: Served) -> None:
    turn_id, id_ = waiting(gateway, "hurried")
    asked = gateway.ports.approvals.now_ms()
    until(lambda: gateway.ports.approvals.now_ms() > asked + 900, "three deadlines to pass")
    assert turn(gateway, turn_id)["state"] == "waiting"
    assert decide(gateway, id_, True).status_code == 200
    assert ended(gateway, turn_id)["stop_reason"] == "answer"


def test_quorum_and_four_eyes(gateway: Served) -> None:
    turn_id, id_ = waiting(gateway, "two")
    assert decide(gateway, id_, True, "ann").json()["state"] == "pending"
    problem(decide(gateway, id_, True, "bob", arguments={"order_id": "o-42", "amount": 1}), 409, "arguments_differ")
    assert decide(gateway, id_, True, "bob").json()["state"] == "approved"
    assert ended(gateway, turn_id)["state"] == "completed"
    turn_id, id_ = waiting(gateway, "careful")
    problem(decide(gateway, id_, True, "sue"), 403, "forbidden")
    assert decide(gateway, id_, False, "ann").status_code == 200


def test_edited_arguments_are_checked_and_are_what_runs(gateway: Served) -> None:
    turn_id, id_ = waiting(gateway)
    refused = problem(decide(gateway, id_, True, arguments={"order_id": "o-42", "amount": "a lot"}), 422, "arguments_invalid")
    assert refused["errors"][0]["loc"] == ["amount"]
    assert read(gateway, id_).json()["state"] == "pending"
    assert decide(gateway, id_, True, arguments={"order_id": "o-42", "amount": 5}).status_code == 200
    ended(gateway, turn_id)
    assert ran == [("o-42", 5)]


def test_unknown_foreign_and_odd_ids_look_the_same(gateway: Served) -> None:
    _, id_ = waiting(gateway)
    bodies = set()
    for odd, who in (("nope", "ann"), ("pending", "ann"), (id_, "eve"), ("x" * 200, "ann"), ("ap_%00", "ann")):
        for answer in (decide(gateway, odd, True, who), read(gateway, odd, who)):
            assert answer.status_code == 404
            bodies.add(answer.text)
    assert len(bodies) == 1
    assert gateway.client.post(f"/v1/approvals/{id_}/reopen", headers=AS["eve"]).status_code == 404
    assert gateway.client.post(f"/v1/approvals/{id_}/link", headers=AS["eve"]).status_code == 404
    assert read(gateway, id_).json()["state"] == "pending"


def test_lists_are_paged_by_a_cursor_that_stays_good(gateway: Served) -> None:
    for one in gateway.client.get("/v1/approvals", params={"limit": 1000}, headers=AS["ann"]).json()["approvals"]:
        decide(gateway, one["approval_id"], False, "root")
    ids = [waiting(gateway)[1] for _ in range(5)]
    seen, cursor = [], None
    while True:
        params = {"limit": 2, "agent": "plain"} | ({"cursor": cursor} if cursor else {})
        page = gateway.client.get("/v1/approvals", params=params, headers=AS["ann"]).json()
        seen += [one["approval_id"] for one in page["approvals"]]
        cursor = page["cursor"]
        if not cursor:
            break
        decide(gateway, page["approvals"][-1]["approval_id"], False)
    assert seen == ids
    denied = gateway.client.get("/v1/approvals", params={"state": "denied", "limit": 1000}, headers=AS["ann"]).json()["approvals"]
    assert {ids[1], ids[3]} <= {one["approval_id"] for one in denied}
    problem(gateway.client.get("/v1/approvals", params={"cursor": "x"}, headers=AS["ann"]), 422, "validation_error")


def audit(gateway: Served, **params: Any) -> list[dict[str, Any]]:
    answer = gateway.client.get("/v1/audit", params={"limit": 1000, **params}, headers=AS["root"])
    assert answer.status_code == 200
    found: list[dict[str, Any]] = answer.json()["entries"]
    return found


def test_the_audit_stream_is_for_admins_and_tells_what_happened(gateway: Served) -> None:
    turn_id, id_ = waiting(gateway)
    decide(gateway, id_, True, note="fine")
    ended(gateway, turn_id)
    told = audit(gateway, approval_id=id_)
    assert [one["event"] for one in told] == ["requested", "decided", "ran"] and told == audit(gateway, turn_id=turn_id)
    assert told[1]["by"] == "ann" and told[1]["from"].startswith("rest:127.0.0.1")
    assert told[2]["ran"] == {"state": "completed", "arguments": {"order_id": "o-42", "amount": 40}}
    assert audit(gateway, approval_id=id_, after=told[0]["seq"]) == told[1:]
    problem(gateway.client.get("/v1/audit", headers=AS["ann"]), 403, "forbidden")
    assert gateway.client.get("/v1/audit", params={"approval_id": id_}, headers=AS["eve"]).json() == {"entries": [], "after": None}
    for wrong in ({"after": -1}, {"limit": 0}, {"approval_id": "a b"}, {"after": "x"}):
        problem(gateway.client.get("/v1/audit", params=wrong, headers=AS["root"]), 422, "validation_error")


def link(gateway: Served, id_: str, who: str = "ann", **body: Any) -> str:
    answer = gateway.client.post(f"/v1/approvals/{id_}/link", json=body, headers=AS[who])
    assert answer.status_code == 200 and set(answer.json()) == {"url", "expires_at"}
    return str(answer.json()["url"])


def test_a_link_shows_the_call_asks_and_decides_only_when_answered(gateway: Served) -> None:
    turn_id, id_ = waiting(gateway)
    url = link(gateway, id_)
    assert url.startswith(f"{gateway.url}/v1/approvals/{id_}/link?link=")
    for _ in range(3):
        page = httpx.get(url)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "billing/refund" in page.text and "o-42" in page.text and "ann" in page.text and "<form" in page.text
        assert "no-store" in page.headers["cache-control"] and "default-src 'none'" in page.headers["content-security-policy"]
    assert read(gateway, id_).json()["state"] == "pending"
    assert httpx.head(url).status_code in (200, 405) and read(gateway, id_).json()["state"] == "pending"
    answered = httpx.post(url, data={"approved": "false", "note": "not this <b>order</b>"})
    assert answered.status_code == 200 and "denied by ann" in answered.text
    settled = read(gateway, id_).json()
    assert settled["state"] == "denied" and settled["note"] == "not this <b>order</b>"
    again = httpx.post(url, data={"approved": "true"})
    assert again.status_code == 409 and "<form" not in again.text
    assert "denied" in httpx.get(url).text and "<form" not in httpx.get(url).text
    assert ended(gateway, turn_id)["calls"][0]["state"] == "denied" and ran == []
    assert [one["event"] for one in audit(gateway, approval_id=id_)] == ["requested", "linked", "decided"]


def test_a_link_can_be_answered_by_a_program_too(gateway: Served) -> None:
    _, id_ = waiting(gateway)
    url = link(gateway, id_)
    problem(httpx.post(url, json={"approved": True, "arguments": {"amount": 1}}), 422, "validation_error")
    problem(httpx.post(url, json={"approved": "yes"}), 422, "validation_error")
    assert httpx.post(url, json={"approved": True}).json()["state"] == "approved"


def test_links_that_are_none_decide_nothing(gateway: Served) -> None:
    _, id_ = waiting(gateway)
    _, other = waiting(gateway)
    url = link(gateway, id_)
    token = url.split("link=")[1]
    for wrong in (f"{url}x", url.replace(id_, other), f"{gateway.url}/v1/approvals/{id_}/link?link=abc"):
        assert httpx.get(wrong).status_code == 404 and "<form" not in httpx.get(wrong).text
        assert httpx.post(wrong, data={"approved": "true"}).status_code == 404
    assert httpx.post(url, data={"approved": "maybe"}).status_code == 422
    assert httpx.post(url, data={}).status_code == 422
    assert gateway.client.get("/v1/approvals", headers={"Authorization": f"Bearer {token}"}).status_code == 401
    assert httpx.get(f"{gateway.url}/v1/approvals/{id_}/link").status_code == 422
    assert httpx.post(f"{gateway.url}/v1/approvals/{id_}/link").status_code == 401
    problem(gateway.client.post(f"/v1/approvals/{id_}/link", json={"sub": "bob"}, headers=AS["ann"]), 403, "forbidden")
    problem(gateway.client.post(f"/v1/approvals/{id_}/link", json={"timeout_s": -1}, headers=AS["ann"]), 422, "validation_error")
    assert {read(gateway, one).json()["state"] for one in (id_, other)} == {"pending"}


def test_what_a_model_wrote_is_no_markup_on_the_page(gateway: Served) -> None:
    _, id_ = waiting(gateway)
    key = f"tm:acme:ap:{id_}"
    gateway.ports.store.client.hset(key, "arguments", json.dumps({"order_id": "<script>alert(1)</script>", "amount": 1}))
    page = httpx.get(link(gateway, id_)).text
    assert "<script" not in page and "&lt;script&gt;" in page


def run(gateway: Served, *words: str, who: str = "ann") -> Any:
    return CliRunner().invoke(command, ["approvals", *words, "--url", gateway.url], env={"TURNMILL_API_KEY": AS[who]["Authorization"][7:]})


def test_the_command_line_lists_shows_and_decides(gateway: Served) -> None:
    turn_id, id_ = waiting(gateway)
    _, other = waiting(gateway)
    listed = run(gateway, "list", "--agent", "plain")
    assert listed.exit_code == 0 and id_ in listed.output and "billing/refund" in listed.output
    assert id_ in [json.loads(line)["approval_id"] for line in run(gateway, "list", "--json").output.splitlines()]
    shown = run(gateway, "show", id_)
    assert '"amount": 40' in shown.output and "moves real money" in shown.output
    approved = run(gateway, "approve", id_, "--arguments", '{"order_id": "o-42", "amount": 2}', "--note", "two only")
    assert approved.exit_code == 0 and "approved" in approved.output and "by ann" in approved.output
    ended(gateway, turn_id)
    assert ran == [("o-42", 2)]
    assert json.loads(run(gateway, "deny", other, "--note", "no", "--json").output)["note"] == "no"


def test_the_command_line_says_what_was_refused(gateway: Served) -> None:
    _, id_ = waiting(gateway)
    for words, who, told in (
        (("approve", id_), "lea", "forbidden"),
        (("approve", id_, "--arguments", '{"amount": 1}'), "ann", "arguments_invalid"),
        (("show", "nope"), "ann", "not_found"),
        (("reopen", id_), "ann", "not_held"),
    ):
        refused = run(gateway, *words, who=who)
        assert refused.exit_code != 0 and told in str(refused.exception)
    assert run(gateway, "approve", id_, "--arguments", "[1]").exit_code != 0
    assert read(gateway, id_).json()["state"] == "pending"


def test_the_hook_of_the_users_module_hears_of_each_request(gateway: Served) -> None:
    _, id_ = waiting(gateway)
    until(lambda: any(one["approval_id"] == id_ for one in hook_heard), "the hook")
    assert [one["approval_id"] for one in hook_heard].count(id_) == 1


class Receiver:
    """A receiver of callbacks that answers as it is told, and keeps what it got."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], str]] = []
        self.answers: list[tuple[int, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                outer.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
                status, headers = outer.answers.pop(0) if outer.answers else (204, {})
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook?x=1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.server.shutdown()
    made.server.server_close()


def make_out_due(gateway: Served, delivery: Delivery) -> None:
    gateway.ports.store.client.zadd("tm:due", {f"out:acme/{delivery.name}": 1}, xx=True)


def test_a_callback_url_is_called_signed_for_the_request_and_for_the_end(gateway: Served, receiver: Receiver) -> None:
    turn_id, id_ = waiting(gateway, callback_url=receiver.url)
    until(lambda: receiver.got, "the request to be told")
    decide(gateway, id_, True)
    ended(gateway, turn_id)
    until(lambda: len(receiver.got) == 2, "the end to be told")
    [secret] = secrets_of("acme", gateway.ports.settings, gateway.ports.secrets)
    told = [Verifier(secret).verify(body, headers) for headers, body in receiver.got]
    assert [one["type"] for one in told] == ["approval.requested", "turn.ended"]
    assert told[0]["data"]["approval_id"] == id_ and told[1]["data"]["answer"] == turn(gateway, turn_id)["answer"]
    assert receiver.got[0][0]["host"] == receiver.url.split("/")[2]
    assert receiver.got[0][0]["content-type"] == "application/json" and re.fullmatch(
        r"v1,[A-Za-z0-9+/=]+", receiver.got[0][0]["webhook-signature"]
    )


def test_a_receiver_that_redirects_or_fails_is_not_followed_and_is_tried_again(gateway: Served, receiver: Receiver) -> None:
    receiver.answers = [(302, {"location": "http://127.0.0.1:1/"}), (503, {"retry-after": "1"})]
    turn_id, id_ = waiting(gateway)
    decide(gateway, id_, False)
    ended(gateway, turn_id)
    turn_id = submit(gateway, "ending", callback_url=receiver.url)
    ended(gateway, turn_id)
    delivery = Delivery(Way.CALLBACK, OutboundEvent.TURN_ENDED, turn_id)

    def told(state: str) -> Callable[[], bool]:
        def look() -> bool:
            make_out_due(gateway, delivery)
            view = gateway.ports.outbound.look("acme", delivery)
            return view is not None and view.state == state

        return look

    until(told("done"), "the delivery")
    ids = [headers["webhook-id"] for headers, body in receiver.got if json.loads(body)["type"] == "turn.ended"]
    assert len(ids) >= 2 and len(set(ids)) == 1


def test_a_receiver_that_never_answers_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestration.outbound import post as posting

    monkeypatch.setattr(posting, "LIMIT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = check_url(f"http://127.0.0.1:{silent.getsockname()[1]}/", ["127.0.0.0/8"])
        assert posting.post(place, {}, "{}", ["127.0.0.0/8"]).code == "timeout"
    assert posting.post(place, {}, "{}", ["127.0.0.0/8"]).code.startswith("unreachable")
    assert posting.post(place, {}, "{}", []).code == "callback_refused"


def test_over_tls_the_name_is_what_is_asked_for_and_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from orchestration.outbound import post as posting

    asked: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path, "hooks.example.test"))
    context.sni_callback = lambda _socket, name, _context: asked.append(name)
    monkeypatch.setattr(posting, "resolve", lambda place, networks: ["127.0.0.1"])

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            taken, _ = listening.accept()
            with contextlib.suppress(ssl.SSLError), context.wrap_socket(taken, server_side=True):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        told = posting.post(check_url(f"https://hooks.example.test:{listening.getsockname()[1]}/", []), {}, "{}", [])
        thread.join(20)
    assert asked == ["hooks.example.test"], "the address is pinned, the name is not lost"
    assert told.code.startswith("unreachable"), "a certificate that nobody vouches for is not taken"


def certificate(directory: Path, name: str) -> Path:
    """A self-signed certificate for `name` with its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(named)
        .issuer_name(named)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    path = directory / "server.pem"
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


def test_a_callback_into_the_inside_is_refused_on_submit(gateway: Served) -> None:
    for url in ("http://169.254.169.254/", "http://[::1]/", "http://10.0.0.5/", "http://u:p@example.com/"):
        answer = gateway.client.post("/v1/agents/plain/turns", json={"input": "x", "callback_url": url}, headers=AS["sue"])
        assert problem(answer, 422, "validation_error")["errors"][0]["loc"][-1] == "callback_url"
    answer = gateway.client.post("/v1/agents/plain/turns", json={"input": "x", "callback_url": "ftp://x/"}, headers=AS["sue"])
    assert answer.status_code == 422
