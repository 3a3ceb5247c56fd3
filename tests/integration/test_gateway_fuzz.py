"""Broken bodies at every route that takes one, over HTTP and on a channel: a 4xx with a code, nothing stored, nothing repeated."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import pytest
from gateway_stage import Served, emptied, served_gateway
from hypothesis import strategies as st

from gateway.channel_messages import Cancel, Decide, Say, parse
from gateway.webhooks.contents import contents
from gateway.webhooks.delivery import Delivery
from orchestration import Agent, GitHubWebhooks, Webhook
from orchestration.core.errors import TurnmillError
from orchestration.models.scripted import FunctionModel
from orchestration.project import Project
from orchestration.testing.servers import RedisServer

#: The same examples in each run.
FIXED = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)

#: Routes that take a JSON body, each with one that it would take.
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/agents/support/turns": {"input": "x", "metadata": {}},
    "/v1/approvals/ap_none/decision": {"approved": True, "arguments": {}},
    "/v1/approvals/ap_none/reopen": {"timeout_s": 5},
    "/v1/chat/completions": {"model": "support", "messages": [{"role": "user", "content": "x"}], "metadata": {}},
    "/v1/webhooks/hub": {"text": "x"},
}

DEEP = 3_000


def spoiled(good: dict[str, Any]) -> dict[str, bytes]:
    """One good body, spoiled in each way."""
    text = json.dumps(good)

    def with_(member: str) -> bytes:
        return f"{text[:-1]}, {member}}}".encode("utf-8", "surrogatepass")

    return {
        "cut short": text[:-1].encode(),
        "not UTF-8": with_('"a": "\x00"').replace(b"\x00", b"\xff\xfe"),
        "overlong UTF-8": with_('"a": "\x00"').replace(b"\x00", b"\xc0\xaf"),
        "a surrogate in UTF-8": with_('"a": "\ud800"'),
        "a lone surrogate": with_('"a": "\\ud800"'),
        "a lone surrogate as a name": with_('"\\udfff": 1'),
        "nested deeply": with_('"a": ' + "[" * DEEP + "]" * DEEP),
        "nested and cut short": with_('"a": ' + '{"a":' * DEEP)[:-1],
        "NaN": with_('"a": NaN'),
        "Infinity": with_('"a": -Infinity'),
        "a huge float": with_('"a": 1e400'),
        "a huge number": with_('"a": ' + "9" * 5_000),
        "a name twice": with_(f'"a": 1, {text[1:]}'[:-1]),
        "a byte order mark": b"\xef\xbb\xbf" + text.encode(),
        "single quotes": text.replace('"', "'").encode(),
        "a comment": with_('/* no */ "a": 1'),
        "UTF-16": text.encode("utf-16"),
        "nothing but space": b"   ",
    }


CASES = [(path, name) for path, good in ROUTES.items() for name in spoiled(good)]


@pytest.fixture(scope="module")
def gateway(turnmill_redis: RedisServer) -> Iterator[Served]:
    hook = Webhook("hub", "support", GitHubWebhooks("GH"), "bot", "dev", lambda request: {"input": request.json["text"]})
    project = Project({"support": Agent("support", FunctionModel(lambda messages: "fine"))}, {"hub": hook})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GH", "gh-secret")
        with served_gateway(emptied(turnmill_redis), project) as served:
            yield served


def post(served: Served, path: str, body: bytes) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    if path.startswith("/v1/webhooks/"):
        headers["X-Hub-Signature-256"] = "sha256=" + hmac.new(b"gh-secret", body, hashlib.sha256).hexdigest()
    return served.client.post(path, content=body, headers=headers)


def stored(served: Served) -> int:
    return sum(1 for _ in served.hand.redis.scan_iter("tm:dev:turn:*"))


@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_spoiled_body_gets_a_clear_refusal_and_changes_nothing(gateway: Served, path: str, name: str) -> None:
    before = stored(gateway)
    answer = post(gateway, path, spoiled(ROUTES[path])[name])
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] in ("bad_request", "validation_error")
    assert stored(gateway) == before


@FIXED
@hypothesis.given(body=st.binary(max_size=400) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
@pytest.mark.parametrize("path", ROUTES)
def test_no_bytes_make_the_gateway_fail(gateway: Served, path: str, body: bytes) -> None:
    answer = post(gateway, path, body)
    assert answer.status_code < 500, answer.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)

MEMBERS = st.sampled_from(
    [
        "input",
        "conversation_id",
        "brief",
        "tools",
        "metadata",
        "callback_url",
        "on_busy",
        "deadline_s",
        "model",
        "messages",
        "approved",
        "arguments",
    ]
)


@FIXED
@hypothesis.given(changed=st.dictionaries(MEMBERS, JSON, min_size=1, max_size=3))
@pytest.mark.parametrize("path", ["/v1/agents/support/turns", "/v1/approvals/ap_none/decision", "/v1/chat/completions"])
def test_no_values_make_the_gateway_fail(gateway: Served, path: str, changed: dict[str, Any]) -> None:
    body = json.dumps({**ROUTES[path], "stream": True, **changed} if "chat" in path else {**ROUTES[path], **changed}).encode()
    with gateway.client.stream("POST", path, content=body, headers={"Content-Type": "application/json"}) as answer:
        assert answer.status_code < 500
        if answer.status_code >= 400:
            answer.read()
            assert answer.json()["code"]


@FIXED
@hypothesis.given(
    text=st.text(max_size=300) | JSON.map(json.dumps) | st.dictionaries(st.sampled_from(["type", "text", "content"]), JSON).map(json.dumps)
)
def test_no_text_makes_a_channel_fail(text: str) -> None:
    try:
        assert isinstance(parse(text), (Say, Decide, Cancel))
    except TurnmillError as error:
        assert error.code in ("bad_request", "validation_error")


@FIXED
@hypothesis.given(
    body=st.binary(max_size=300), kind=st.sampled_from(["", "application/json", "application/x-www-form-urlencoded", "text/xml"])
)
def test_no_body_makes_a_webhook_fail(body: bytes, kind: str) -> None:
    try:
        contents(Delivery({"content-type": kind}, body))
    except TurnmillError as error:
        assert error.code in ("bad_request", "validation_error")
