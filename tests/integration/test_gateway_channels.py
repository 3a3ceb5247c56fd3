"""Channels: talking with an agent over a WebSocket, against a served gateway whose turns are worked through."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

import pytest
from gateway_stage import Served, emptied, served_gateway, until
from pydantic import BaseModel, Field
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from gateway.parts import Pace
from gateway.rates import Brake
from orchestration import Agent, tool
from orchestration.actions import read
from orchestration.models.scripted import FunctionModel, Step
from orchestration.project import Project
from orchestration.state.api_keys import create_key, revoke_key
from orchestration.testing.local import LocalMesh
from orchestration.testing.servers import RedisServer

release = threading.Event()
shown: list[list[dict[str, Any]]] = []
KEY, READER, STRANGER, DECIDER = "key-of-the-talker-1", "key-of-the-reader-1", "key-of-the-stranger", "key-of-the-decider"


@tool("shop/refund", approval="money moves")
def refund(order: str) -> str:
    """Refund an order."""
    return f"refunded {order}"


def think(messages: list[dict[str, Any]], tools: list[Any]) -> Step:
    shown.append(messages)
    said = str(messages[-1]["content"])
    if messages[-1]["role"] == "tool":
        return Step(f"done: {said}")
    if "refund" in said:
        return Step("one moment", tool_calls=[("shop-refund", {"order": "o-1"})])
    if "slow" in said:
        return Step("at last", release=release)
    return Step(f"you said {said}", chunks=3)


class Preferences(BaseModel):
    """What clients of the guide may give."""

    locale: str = Field(pattern="^[a-z]{2}$")
    age: int | None = None


def keys() -> str:
    both = ["turns:write", "turns:read"]
    return json.dumps(
        [
            {"key": KEY, "sub": "ann", "tenant": "acme", "scopes": [*both]},
            {"key": READER, "sub": "bob", "tenant": "acme", "scopes": ["turns:read"]},
            {"key": DECIDER, "sub": "dee", "tenant": "acme", "scopes": [*both, "approvals:decide", "approvals:read"]},
            {"key": STRANGER, "sub": "eve", "tenant": "rival", "scopes": [*both, "approvals:decide"]},
        ]
    )


@pytest.fixture(scope="module")
def gateway(turnmill_redis: RedisServer) -> Iterator[Served]:
    model = FunctionModel(think)
    agents = {"support": Agent("support", model, tools=[refund]), "guide": Agent("guide", model, parameters=Preferences)}
    settings: dict[str, Any] = {"api_keys": keys(), "channel_inbound": 4, "max_body_bytes": 20_000}
    pace = Pace(recheck_s=0.1)
    with served_gateway(
        turnmill_redis.url, Project(agents=agents), working=True, mesh=LocalMesh([refund]), pace=pace, **settings
    ) as served:
        yield served
        release.set()


@contextmanager
def channel(served: Served, agent: str = "support", key: str | None = KEY, **query: Any) -> Iterator[ClientConnection]:
    url = f"{served.url.replace('http', 'ws', 1)}/v1/agents/{agent}/channel?{urlencode(query, doseq=True)}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with connect(url, additional_headers=headers) as socket:
        yield socket


def hear(socket: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(socket.recv(timeout=30))
    return found


def hear_to(socket: ClientConnection, kind: str, **fields: Any) -> list[dict[str, Any]]:
    """All frames up to the first of this kind that has these fields."""
    found = [hear(socket)]
    while not (found[-1]["kind"] == kind and all(found[-1].get(name) == value for name, value in fields.items())):
        found.append(hear(socket))
    return found


def closed(socket: ClientConnection) -> int:
    with pytest.raises(ConnectionClosed) as caught:
        socket.recv(timeout=30)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code


def refused(served: Served, **options: Any) -> tuple[str, int]:
    with channel(served, **options) as socket:
        told = hear(socket)
        assert told["kind"] == "error" and told["error"] == told["code"] and told["detail"]
        return told["code"], closed(socket)


# Talking


def test_a_message_is_answered_on_the_channel(gateway: Served) -> None:
    with channel(gateway) as socket:
        opened = hear(socket)
        assert set(opened) == {"kind", "conversation_id", "agent"}
        socket.send(json.dumps("hello"))
        frames = hear_to(socket, "done")
        assert [frame["kind"] for frame in frames] == ["turn", "token", "message", "done"]
        assert frames[2]["content"] == "you said hello"
        assert all(frame["seq"] for frame in frames)
        for said in (
            {"text": "as text"},
            {"content": "as content"},
            {"type": "message", "role": "user", "content": [{"type": "text", "text": "part"}]},
        ):
            socket.send(json.dumps(said))
            assert hear_to(socket, "done")[-2]["kind"] == "message"
    history = gateway.client.get(
        f"/v1/conversations/{opened['conversation_id']}/history", headers={"Authorization": f"Bearer {READER}"}
    ).json()
    assert len(history["history"]) == 8


def test_messages_of_one_channel_are_answered_in_their_order(gateway: Served) -> None:
    with channel(gateway, events="message") as socket:
        hear(socket)
        for number in range(4):
            socket.send(json.dumps(f"number {number}"))
        assert [hear(socket)["content"] for _ in range(4)] == [f"you said number {number}" for number in range(4)]


def test_a_channel_that_comes_back_gets_the_rest(gateway: Served) -> None:
    with channel(gateway) as socket:
        conversation = hear(socket)["conversation_id"]
        socket.send('"first"')
        first = hear_to(socket, "done")
        release.clear()
        socket.send('"slow"')
        hear_to(socket, "turn", state="running")
    release.set()
    until(lambda: ended(gateway, conversation), "the turn that nobody watches to end")
    with channel(gateway, conversation_id=conversation, after=first[-1]["seq"]) as socket:
        rest = hear_to(socket, "done")
        assert rest[0]["seq"] > first[-1]["seq"]
        assert rest[-2]["content"] == "at last"
    with channel(gateway, conversation_id=conversation, after=0) as socket:
        again = hear_to(socket, "done")
        assert again == first
    with channel(gateway, conversation_id=conversation) as socket:
        socket.send('"now"')
        assert hear_to(socket, "done")[-2]["content"] == "you said now"


def ended(served: Served, conversation: str) -> bool:
    found = served.client.get(f"/v1/conversations/{conversation}", headers={"Authorization": f"Bearer {READER}"}).json()
    return found["running_turn_id"] is None


def test_two_channels_of_one_conversation_hear_the_same(gateway: Served) -> None:
    with channel(gateway) as one:
        conversation = hear(one)["conversation_id"]
        with channel(gateway, conversation_id=conversation, key=DECIDER) as other:
            other.send('"hi"')
            assert hear_to(one, "done") == hear_to(other, "done")


def test_what_a_client_sent_before_it_went_is_stored(gateway: Served) -> None:
    with channel(gateway) as socket:
        conversation = hear(socket)["conversation_id"]
        socket.send('"and goodbye"')

    def answered() -> bool:
        found = gateway.client.get(f"/v1/conversations/{conversation}/history", headers={"Authorization": f"Bearer {READER}"})
        return found.status_code == 200 and len(found.json()["history"]) == 2

    until(answered, "the answer to somebody who left")


def test_a_message_with_a_key_is_one_turn_however_often_it_is_sent(gateway: Served) -> None:
    with channel(gateway, events="message") as socket:
        hear(socket)
        for _ in range(3):
            socket.send(json.dumps({"text": "once", "idempotency_key": "k-1"}))
        socket.send(json.dumps("last"))
        assert [hear(socket)["content"] for _ in range(2)] == ["you said once", "you said last"]


# Deciding and cancelling


def test_an_approval_is_decided_on_the_channel_by_who_may(gateway: Served) -> None:
    with channel(gateway, key=DECIDER) as socket:
        hear(socket)
        socket.send('"refund please"')
        asked = hear_to(socket, "approval_request")[-1]
        decision = {
            "type": "decision",
            "approval_id": asked["approval_id"],
            "approved": True,
            "arguments": {"order": "o-2"},
            "note": "fine",
        }
        with channel(gateway, key=KEY) as other:
            hear(other)
            other.send(json.dumps(decision))
            assert hear(other)["code"] == "forbidden"
        with channel(gateway, key=STRANGER) as other:
            hear(other)
            other.send(json.dumps(decision))
            assert hear(other)["code"] == "not_found"
        socket.send(json.dumps(decision))
        rest = hear_to(socket, "done")
        kinds = [frame["kind"] for frame in rest]
        assert kinds.index("approval_decision") < kinds.index("tool_result") < kinds.index("message")
        assert "refunded o-2" in rest[-2]["content"]
        told = read.audit(gateway.ports, "acme", approval_id=asked["approval_id"])["entries"]
        assert [entry["from"] for entry in told if entry["event"] == "decided"] == ["channel:127.0.0.1"]
        socket.send(json.dumps({**decision, "approved": False}))
        assert hear(socket)["code"] == "already_decided"


@pytest.mark.parametrize(
    "decision",
    [
        {"approved": True},
        {"approval_id": "ap_1"},
        {"approval_id": "ap_1", "approved": "yes"},
        {"approval_id": "ap_1", "approved": 1},
        {"approval_id": "a b", "approved": True},
        {"approval_id": "ap_1", "approved": True, "surprise": 1},
    ],
)
def test_what_is_no_clear_decision_decides_nothing(gateway: Served, decision: dict[str, Any]) -> None:
    with channel(gateway, key=DECIDER) as socket:
        hear(socket)
        socket.send(json.dumps({"type": "decision", **decision}))
        assert hear(socket)["code"] == "validation_error"


def test_a_turn_is_cancelled_on_the_channel(gateway: Served) -> None:
    release.clear()
    with channel(gateway) as socket:
        hear(socket)
        socket.send('{"type": "cancel"}')
        assert hear(socket)["code"] == "turn_ended"
        socket.send('"slow"')
        hear_to(socket, "turn", state="running")
        socket.send('{"type": "cancel"}')
        assert hear_to(socket, "done")[-1]["stop_reason"] == "cancelled"
        release.set()


# Parameters


def test_parameters_reach_the_agent(gateway: Served) -> None:
    with channel(gateway, "guide", locale="de", age="7", events="message") as socket:
        conversation = hear(socket)["conversation_id"]
        socket.send('"hi"')
        assert hear(socket)["content"] == "you said hi"
    system = next(messages[0]["content"] for messages in reversed(shown) if messages[0]["role"] == "system")
    assert '{"locale":"de","age":7}' in system
    headers = {"Authorization": f"Bearer {READER}"}
    turn_id = gateway.client.get(f"/v1/conversations/{conversation}/history", headers=headers).json()["history"][0]["turn_id"]
    assert gateway.client.get(f"/v1/turns/{turn_id}", headers=headers).json()["metadata"] == {"parameters": {"locale": "de", "age": 7}}


def test_an_agent_that_declares_no_parameters_takes_texts(gateway: Served) -> None:
    with channel(gateway, "support", tag=["a", "b"], events="message") as socket:
        hear(socket)
        socket.send('"hi"')
        hear(socket)
    assert '{"tag":["a","b"]}' in shown[-1][0]["content"]


def test_wrong_parameters_open_no_channel(gateway: Served) -> None:
    assert refused(gateway, agent="guide", locale="german") == ("validation_error", 4422)
    assert refused(gateway, agent="guide") == ("validation_error", 4422)
    assert refused(gateway, agent="guide", locale="de", surprise="x") == ("validation_error", 4422)
    assert refused(gateway, conversation_id="not an id") == ("validation_error", 4422)
    assert refused(gateway, events="everything") == ("validation_error", 4422)
    assert refused(gateway, note="x" * 3000) == ("validation_error", 4422)
    for after in ("-1", "x", "1.5", "+1"):
        assert refused(gateway, after=after) == ("bad_event_id", 4400)
    assert refused(gateway, agent="nobody") == ("unknown_agent", 4404)


# Who may come in


def test_who_may_not_talk_hears_why_and_no_more(gateway: Served) -> None:
    assert refused(gateway, key=None) == ("unauthorized", 4401)
    assert refused(gateway, key="key-of-nobody") == ("unauthorized", 4401)
    assert refused(gateway, key=READER) == ("forbidden", 4403)
    assert refused(gateway, key=None, ticket="tkt_unknown") == ("unauthorized", 4401)
    for name in ("token", "access_token", "api_key"):
        assert refused(gateway, key=None, **{name: KEY}) == ("unauthorized", 4401)
        assert refused(gateway, **{name: KEY}) == ("bad_request", 4400), "a token must not become a parameter"


def test_a_browser_comes_in_with_a_ticket(gateway: Served) -> None:
    ticket = gateway.client.post("/v1/tickets", headers={"Authorization": f"Bearer {KEY}"}).json()["ticket"]
    with channel(gateway, key=None, ticket=ticket, events="message") as socket:
        hear(socket)
        socket.send('"hi"')
        assert hear(socket)["content"] == "you said hi"
    assert ticket not in json.dumps(shown)
    assert refused(gateway, key=None, ticket=ticket) == ("unauthorized", 4401)


def test_a_channel_ends_when_its_key_is_revoked(gateway: Served) -> None:
    key, known = create_key(gateway.hand.redis, "tom", "acme", ["turns:write", "turns:read"])
    with channel(gateway, key=key) as idle, channel(gateway, key=key) as busy:
        hear(idle), hear(busy)
        revoke_key(gateway.hand.redis, known.key_id)
        busy.send('"hi"')
        assert hear(busy)["code"] == "unauthorized"
        assert closed(busy) == 4401
        assert hear(idle)["code"] == "unauthorized"
        assert closed(idle) == 4401


def test_another_tenants_conversation_is_another_one(gateway: Served) -> None:
    with (
        channel(gateway, conversation_id="same-name", events="message") as mine,
        channel(gateway, key=STRANGER, conversation_id="same-name") as theirs,
    ):
        mine.send('"secret"')
        assert hear(mine)["content"] == "you said secret"
        theirs.send('"mine"')
        assert hear_to(theirs, "done")[-2]["content"] == "you said mine"
        assert "secret" not in json.dumps(shown[-1])


# Bad input


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("hello", "bad_request"),
        ("", "bad_request"),
        ("7", "bad_request"),
        ("null", "bad_request"),
        ("[]", "bad_request"),
        ('{"text": NaN}', "bad_request"),
        ('{"text": "a", "text": "b"}', "bad_request"),
        ("[" * 5000, "bad_request"),
        ('""', "validation_error"),
        ("{}", "validation_error"),
        ('{"text": 7}', "validation_error"),
        ('{"text": "\\ud800"}', "validation_error"),
        ('{"type": "dance", "text": "x"}', "validation_error"),
        ('{"text": "x", "on_busy": "shove"}', "validation_error"),
        ('{"type": "cancel", "turn_id": "a b"}', "validation_error"),
        (json.dumps("x" * 30_000), "too_large"),
        (json.dumps("ü" * 15_000, ensure_ascii=False), "too_large"),
    ],
)
def test_what_is_no_message_is_told_and_the_channel_goes_on(gateway: Served, text: str, code: str) -> None:
    with channel(gateway, events="message") as socket:
        hear(socket)
        socket.send(text)
        assert hear(socket)["code"] == code
        socket.send('"still here"')
        assert hear(socket)["content"] == "you said still here"


def test_a_binary_frame_is_told_and_the_channel_goes_on(gateway: Served) -> None:
    with channel(gateway, events="message") as socket:
        hear(socket)
        socket.send(b"\x00\xff")
        assert hear(socket)["code"] == "bad_request"
        socket.send('"still here"')
        assert hear(socket)["content"] == "you said still here"


def test_a_peer_that_floods_is_told_which_messages_were_not_taken(gateway: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()
    take = Brake.take

    def held(brake: Brake, *arguments: Any) -> None:
        reached.set()
        go_on.wait(30)
        take(brake, *arguments)

    with channel(gateway, events="message") as socket:
        hear(socket)
        monkeypatch.setattr(Brake, "take", held)
        socket.send('"number 0"')
        assert reached.wait(30)
        for number in range(1, 9):  # four of them may wait
            socket.send(json.dumps(f"number {number}"))
        told = [hear(socket) for _ in range(4)]
        assert {one["code"] for one in told} == {"rate_limited"}
        assert all(one["retry_after_s"] >= 1 for one in told)
        go_on.set()
        assert [hear(socket)["content"] for _ in range(5)] == [f"you said number {number}" for number in range(5)]


def test_a_channel_counts_against_its_principals_rate(turnmill_redis: RedisServer) -> None:
    agents = {"support": Agent("support", FunctionModel(think))}
    with served_gateway(
        emptied(turnmill_redis), Project(agents=agents), api_keys=keys(), rate_per_s=random.uniform(0.005, 0.01), rate_burst=3
    ) as served:
        with channel(served) as socket:
            hear(socket)
            for number in range(3):
                socket.send(json.dumps(f"number {number}"))
            frames = hear_to(socket, "error")
        assert frames[-1]["code"] == "rate_limited" and frames[-1]["retry_after_s"] > 1
        assert refused(served) == ("rate_limited", 4429)


def test_a_stopping_gateway_sends_its_channels_away(turnmill_redis: RedisServer) -> None:
    agents = {"support": Agent("support", FunctionModel(think))}
    with served_gateway(turnmill_redis.url, Project(agents=agents), api_keys=keys()) as served, channel(served) as socket:
        hear(socket)
        until(lambda: served.watching == 1, "the channel to listen")
        served.app.state.parts.hub.stop()
        assert closed(socket) == 1001


def test_while_the_store_is_away_a_message_is_not_taken_and_the_channel_stays() -> None:
    agents = {"support": Agent("support", FunctionModel(think))}
    with RedisServer(appendonly="always") as server, served_gateway(server.url, Project(agents=agents), api_keys=keys()) as served:
        with channel(served) as socket:
            conversation = hear(socket)["conversation_id"]
            until(lambda: served.watching == 1, "the channel to listen")
            server.shut_down()
            socket.send('"hi"')
            assert hear(socket)["code"] == "store_unavailable"
            server.start()
            socket.send('"hi again"')
            assert hear_to(socket, "turn")[-1]["state"] == "running"
        headers = {"Authorization": f"Bearer {READER}"}
        history = served.client.get(f"/v1/conversations/{conversation}/history", headers=headers).json()["history"]
        assert [entry["data"] for entry in history] == ["hi again"]
