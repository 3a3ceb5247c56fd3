"""Webhooks in, over HTTP: each scheme's requests as its sender makes them, their repetitions, and what is answered at once."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import httpx
import psutil
import pytest
from gateway_stage import Served, emptied, served_gateway, until
from slack_sdk.signature import SignatureVerifier
from standardwebhooks.webhooks import Webhook as Signer
from stripe import WebhookSignature
from twilio.request_validator import RequestValidator

from gateway.webhooks import routes
from gateway.webhooks.slack import SlackVerifier
from gateway.webhooks.standard import StandardVerifier
from gateway.webhooks.stripe import StripeVerifier
from orchestration import (
    Agent,
    BearerWebhooks,
    GitHubWebhooks,
    SlackWebhooks,
    StandardWebhooks,
    StripeWebhooks,
    TwilioWebhooks,
    Webhook,
    WebhookAnswer,
    WebhookRequest,
)
from orchestration.core import webhook as schemes
from orchestration.models.scripted import FunctionModel, Step
from orchestration.project import Project
from orchestration.state.api_keys import create_key
from orchestration.testing.servers import RedisServer

NOW = 1_700_000_000
PLAIN_SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
SECRETS = {"GH": "gh-secret", "SL": "sl-secret", "TW": "tw-token", "ST": "st-secret", "BEARER": "a-shared-secret", "PLAIN": PLAIN_SECRET}
FORM = "application/x-www-form-urlencoded"

release = threading.Event()
answers: list[WebhookAnswer] = []


def think(messages: list[dict[str, Any]]) -> Step:
    """A model that answers at once, unless the message says that it is slow."""
    said = str(messages[-1]["content"])
    return Step(f"you said {said}", release=release if "slow" in said else None)


def say(request: WebhookRequest) -> dict[str, Any] | None:
    if isinstance(request.json, dict) and request.json.get("type") == "nothing":
        return None
    text = request.form.get("Body") or (request.json or {}).get("text") or request.body.decode()
    # As from a database's sequence: another input each time it is asked.
    return {"input": f"{text} ({time.monotonic_ns()})", "metadata": {"from": request.form.get("From", "")}}


def answered(answer: WebhookAnswer) -> None:
    answers.append(answer)


def project() -> Project:
    agent = Agent("support", FunctionModel(think))
    declared = {
        "hub": GitHubWebhooks("GH"),
        "chat": SlackWebhooks("SL"),
        "sms": TwilioWebhooks("TW"),
        "pay": StripeWebhooks("ST"),
        "plain": StandardWebhooks("PLAIN"),
        "shared": BearerWebhooks("BEARER"),
    }
    hooks = {name: Webhook(name, "support", scheme, f"{name}-bot", "dev", say, answered) for name, scheme in declared.items()}
    return Project(agents={"support": agent}, webhooks=hooks)


def serve(url: str, patch: pytest.MonkeyPatch, **more: Any) -> Any:
    for name, secret in SECRETS.items():
        patch.setenv(name, secret)
    return served_gateway(url, project(), **more)


@pytest.fixture(scope="module")
def url(turnmill_redis: RedisServer) -> str:
    return emptied(turnmill_redis)


@pytest.fixture(scope="module")
def gateway(url: str) -> Iterator[Served]:
    """A gateway whose turns are worked through."""
    with pytest.MonkeyPatch.context() as patch, serve(url, patch, working=True) as served:
        yield served
        release.set()


@pytest.fixture(scope="module")
def then(url: str) -> Iterator[Served]:
    """A gateway whose clock stands at the time of recorded requests, reached over TLS as hooks.example.com; nothing runs its turns."""

    def clock() -> float:
        return NOW

    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # verifiers are made when a gateway starts, and only then
            for scheme, make in (
                (schemes.SlackWebhooks, SlackVerifier),
                (schemes.StandardWebhooks, StandardVerifier),
                (schemes.StripeWebhooks, StripeVerifier),
            ):
                patch.setitem(routes.VERIFIERS, scheme, lambda declared, environ, make=make: make(declared, environ, clock))
            served = stack.enter_context(serve(url, patch))
        yield served


def turns_of(served: Served) -> set[str]:
    return {str(key) for key in served.hand.redis.scan_iter("tm:dev:turn:tn_*") if ":steer" not in str(key)}


def post(served: Served, name: str, body: bytes | str, headers: dict[str, str], **more: Any) -> httpx.Response:
    return served.client.post(f"/v1/webhooks/{name}", content=body, headers=headers, **more)


# Recorded requests


HUB_BODY = b'{ "action":"opened",\n  "n": 1.0, "t":"caf\\u00e9 \xc3\xa9" }'
HUB_SIGNATURE = "sha256=0675616b33f78db51218cb7bbda183fcb7397a38b14e4c57a3c1251089fe08f2"


def test_github_is_proven_by_the_bytes_as_sent(then: Served) -> None:
    taken = post(then, "hub", HUB_BODY, {"X-Hub-Signature-256": HUB_SIGNATURE, "X-GitHub-Delivery": "d-1"})
    assert taken.status_code == 202, taken.text
    before = turns_of(then)
    for headers in (
        {},
        {"X-Hub-Signature-256": "sha256=" + "0" * 64},
        {"X-Hub-Signature-256": "sha256="},
        {"X-Hub-Signature": "sha1=" + hmac.new(b"gh-secret", HUB_BODY, hashlib.sha1).hexdigest()},
        {"X-Hub-Signature-256": HUB_SIGNATURE.removeprefix("sha256=")},
    ):
        refused = post(then, "hub", HUB_BODY, {**headers, "X-GitHub-Delivery": "d-2"})
        assert (refused.status_code, refused.json()["code"]) == (401, "bad_signature")
    assert turns_of(then) == before
    counted = then.client.get("/metrics").text
    assert 'turnmill_gateway_webhook_deliveries_total{outcome="turn",webhook="hub"} 1.0' in counted
    assert 'turnmill_gateway_webhook_deliveries_total{outcome="bad_signature",webhook="hub"} 5.0' in counted


def test_githubs_ping_is_answered_and_means_no_turn(then: Served) -> None:
    before = turns_of(then)
    headers = {"X-Hub-Signature-256": HUB_SIGNATURE, "X-GitHub-Delivery": "d-3", "X-GitHub-Event": "ping"}
    assert post(then, "hub", HUB_BODY, headers).status_code == 204
    assert turns_of(then) == before


def test_slacks_handshake(then: Served) -> None:
    body = b'{"token":"x","challenge":"c-123","type":"url_verification"}'
    headers = {"X-Slack-Request-Timestamp": str(NOW), "Content-Type": "application/json"}
    right = "v0=c0d7fd9d4fba7d1d8cf722bb6a472c6e7a8b7d492420a3896714ea4b3c946a14"
    before = turns_of(then)
    answer = post(then, "chat", body, {**headers, "X-Slack-Signature": right})
    assert (answer.status_code, answer.json()) == (200, {"challenge": "c-123"})
    wrong = post(then, "chat", body, {**headers, "X-Slack-Signature": right[:-1] + "5"})
    assert (wrong.status_code, "c-123" in wrong.text) == (401, False)
    assert turns_of(then) == before


def test_a_slack_event_that_is_a_retry_counts_when_it_is_the_first_to_arrive(then: Served) -> None:
    event = {"type": "message", "channel": "C1", "ts": "1700000000.000100", "text": "hi"}
    body = json.dumps({"type": "event_callback", "event_id": "Ev1", "event": event}, separators=(",", ":")).encode()
    signature = "v0=f700ac76a3e9852a40fcf0a0625e79ab8093f528d231caa253e61af0fb5def22"
    headers = {"X-Slack-Request-Timestamp": str(NOW), "X-Slack-Signature": signature}
    before = turns_of(then)
    first = post(then, "chat", body, {**headers, "X-Slack-Retry-Num": "1"})
    later = SignatureVerifier("sl-secret").generate_signature(timestamp=str(NOW + 60), body=body)
    again = post(then, "chat", body, {"X-Slack-Request-Timestamp": str(NOW + 60), "X-Slack-Signature": str(later)})
    third = post(then, "chat", body, {**headers, "X-Slack-Retry-Num": "3"})
    assert (first.status_code, again.status_code, third.status_code) == (200, 200, 200)
    assert first.json() == again.json() == third.json()
    assert len(turns_of(then) - before) == 1


def test_what_a_slack_command_is_answered_with_says_nothing_to_who_gave_it(then: Served) -> None:
    body = urlencode({"command": "/ask", "text": "hi", "trigger_id": "t1"})
    signature = SignatureVerifier("sl-secret").generate_signature(timestamp=str(NOW), body=body)
    headers = {"X-Slack-Request-Timestamp": str(NOW), "X-Slack-Signature": str(signature), "Content-Type": FORM}
    answer = post(then, "chat", body, headers)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["location"].startswith("/v1/turns/tn_")


def test_standard_webhooks_with_several_signatures(then: Served) -> None:
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(NOW),
        "webhook-signature": "v1,AAAA v2,zzz v1,ulv8j9V682ekQD7f5pyj9nPiSzsn1HRl5k+V4gVDxnQ=",
    }
    assert post(then, "plain", b'{"type":"ping","data":{}}', headers).status_code == 202


def test_stripe_with_several_signatures(then: Served) -> None:
    body, wrong = b'{"id":"evt_1","type":"charge.succeeded"}', "0" * 64
    right = "e9eedb8730cc42528874ed18a63364e78418de1259fcc0511b24f3b29dc8327e"
    statuses = [
        post(then, "pay", body, {"Stripe-Signature": header}).status_code
        for header in (f"t={NOW},v1={wrong},v1={right},v0=abc", f"t={NOW},v1={right},v1={wrong},v0=abc", f"t={NOW},v0=abc")
    ]
    assert statuses == [202, 202, 401]


@pytest.mark.parametrize(("age_s", "taken"), [(299, True), (301, False)])
def test_a_signed_time_holds_for_five_minutes(then: Served, age_s: int, taken: bool) -> None:
    at = NOW - age_s
    body = json.dumps({"id": f"evt_{age_s}", "event_id": f"Ev{age_s}", "text": "hi"})
    slack = {
        "X-Slack-Request-Timestamp": str(at),
        "X-Slack-Signature": str(SignatureVerifier("sl-secret").generate_signature(timestamp=str(at), body=body)),
    }
    stripe = {"Stripe-Signature": WebhookSignature.generate_signature_header(body, "st-secret", timestamp=at)}
    signature = Signer(PLAIN_SECRET).sign(f"msg_{age_s}", datetime.fromtimestamp(at, UTC), body)
    plain = {"webhook-id": f"msg_{age_s}", "webhook-timestamp": str(at), "webhook-signature": signature}
    statuses = [post(then, name, body, headers).status_code for name, headers in (("chat", slack), ("pay", stripe), ("plain", plain))]
    assert statuses == ([200, 202, 202] if taken else [401, 401, 401])


SMS = {"MessageSid": "SM1", "From": "+15550001", "To": "+15550002", "Body": "héllo + you", "NumMedia": "0", "MediaUrl0": ""}
SMS_SIGNATURE = "Jhrz9wS4Hg2ax9WqJJzGqfH50LU="
FORWARDED = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "hooks.example.com"}


def sms(served: Served, headers: dict[str, str]) -> httpx.Response:
    headers = {"X-Twilio-Signature": SMS_SIGNATURE, "Content-Type": FORM, **headers}
    return post(served, "sms?team=a%20b", urlencode(SMS), headers)


def test_twilio_behind_a_proxy_that_ends_tls(then: Served) -> None:
    first = sms(then, FORWARDED)
    assert (first.status_code, first.headers["content-type"]) == (200, "text/xml; charset=utf-8")
    assert first.content.endswith(b"<Response></Response>")
    again = sms(then, {**FORWARDED, "X-Forwarded-For": "203.0.113.7"})
    assert again.headers["location"] == first.headers["location"]
    for headers in ({}, {**FORWARDED, "X-Forwarded-Proto": "http"}, {**FORWARDED, "X-Forwarded-Host": "other.example.com"}):
        assert sms(then, headers).status_code == 401


def test_twilio_where_the_public_url_is_set_or_the_proxy_is_not_trusted(
    turnmill_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(turnmill_redis.url, monkeypatch, public_url="https://hooks.example.com/") as served:
        assert sms(served, {}).status_code == 200
    with serve(turnmill_redis.url, monkeypatch, trusted_proxies=("10.0.0.0/8",)) as served:
        assert sms(served, FORWARDED).status_code == 401


# Repetitions


def shared(served: Served, text: str, key: str | None) -> httpx.Response:
    headers = {"Authorization": "Bearer a-shared-secret"} | ({"Idempotency-Key": key} if key else {})
    return post(served, "shared", json.dumps({"text": text}), headers)


def test_a_delivery_that_comes_again_is_the_same_turn_also_when_that_has_ended(gateway: Served) -> None:
    body = b'{"text":"again"}'
    headers = {"X-Hub-Signature-256": "sha256=" + hmac.new(b"gh-secret", body, hashlib.sha256).hexdigest(), "X-GitHub-Delivery": "again-1"}
    first = post(gateway, "hub", body, headers).json()
    assert post(gateway, "hub", body, headers).json()["turn_id"] == first["turn_id"]
    until(lambda: gateway.client.get(f"/v1/turns/{first['turn_id']}").json()["state"] == "completed", "the turn to end")
    again = post(gateway, "hub", body, headers)
    assert (again.status_code, again.json()["turn_id"]) == (202, first["turn_id"])
    other = post(gateway, "hub", body, {**headers, "X-GitHub-Delivery": "again-2"}).json()
    assert other["turn_id"] != first["turn_id"]


def test_deliveries_that_come_together_are_one_turn(gateway: Served) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: shared(gateway, "together", "together-1").json()["turn_id"], range(16)))
    assert len(set(found)) == 1


def test_one_id_of_two_webhooks_or_for_two_bodies_is_not_the_same_delivery(gateway: Served) -> None:
    first = shared(gateway, "one", "id-1")
    assert first.status_code == 202
    mismatch = shared(gateway, "another", "id-1")
    assert (mismatch.status_code, mismatch.json()["code"]) == (409, "idempotency_mismatch")
    body = b'{"text":"one"}'
    headers = {"X-Hub-Signature-256": "sha256=" + hmac.new(b"gh-secret", body, hashlib.sha256).hexdigest(), "X-GitHub-Delivery": "id-1"}
    assert post(gateway, "hub", body, headers).json()["turn_id"] != first.json()["turn_id"]
    assert shared(gateway, "one", None).json()["turn_id"] != shared(gateway, "one", None).json()["turn_id"]
    long = "k" * 300
    assert shared(gateway, "long", long).json() == shared(gateway, "long", long).json()


# Answers


def test_the_answer_goes_back_through_the_webhooks_function(gateway: Served) -> None:
    body = urlencode({**SMS, "MessageSid": "SM-answer", "Body": "ping"})
    signature = RequestValidator("tw-token").compute_signature(
        f"{gateway.url}/v1/webhooks/sms", {**SMS, "MessageSid": "SM-answer", "Body": "ping"}
    )
    taken = post(gateway, "sms", body, {"X-Twilio-Signature": signature, "Content-Type": FORM})
    assert taken.status_code == 200, taken.text
    turn_id = taken.headers["location"].rpartition("/")[2]
    until(lambda: any(one.turn_id == turn_id for one in answers), "the answer")
    (answer,) = [one for one in answers if one.turn_id == turn_id]
    assert (answer.webhook, answer.state, answer.stop_reason, answer.metadata["from"]) == ("sms", "completed", "answer", "+15550001")
    assert answer.answer.startswith("you said ping")
    assert answer.delivery_id


# Sizes and times


def test_what_is_too_big_is_refused_without_being_read(then: Served) -> None:
    limit = then.ports.settings.max_body_bytes
    body = b'{"text": "' + b"x" * (limit - 12) + b'"}'
    assert len(body) == limit
    signed = {"X-Hub-Signature-256": "sha256=" + hmac.new(b"gh-secret", body, hashlib.sha256).hexdigest(), "X-GitHub-Delivery": "big-1"}
    before = psutil.Process().memory_info().rss
    assert post(then, "hub", body + b" ", signed).status_code == 413
    chunks = (b"x" * 65_536 for _ in range(50 * 16))
    with contextlib.suppress(httpx.WriteError):  # the gateway hung up before all was sent, which is as good
        assert then.client.post("/v1/webhooks/hub", content=chunks, headers=signed).status_code == 413
    assert next(chunks, None) is not None, "the whole body was read"
    url = httpx.URL(then.url)
    with socket.create_connection((url.host, url.port or 80), 10) as raw:
        raw.sendall(b"POST /v1/webhooks/hub HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n" + b"x" * 10)
        answer = raw.recv(65_536)
        with contextlib.suppress(OSError):
            for _ in range(50 * 16):
                raw.sendall(b"x" * 65_536)
    assert answer.startswith(b"HTTP/1.1 401")
    assert psutil.Process().memory_info().rss - before < 40_000_000
    assert post(then, "hub", body, signed).status_code == 202


def slow(name: str, number: int) -> tuple[bytes, dict[str, str]]:
    now, id_ = int(time.time()), f"slow-{name}-{number}"
    body = json.dumps({"text": f"slow {number}", "id": id_, "event_id": id_}).encode()
    match name:
        case "hub":
            signature = hmac.new(b"gh-secret", body, hashlib.sha256).hexdigest()
            return body, {"X-Hub-Signature-256": f"sha256={signature}", "X-GitHub-Delivery": id_}
        case "chat":
            signature = str(SignatureVerifier("sl-secret").generate_signature(timestamp=str(now), body=body))
            return body, {"X-Slack-Request-Timestamp": str(now), "X-Slack-Signature": signature}
        case "pay":
            return body, {"Stripe-Signature": WebhookSignature.generate_signature_header(body.decode(), "st-secret", timestamp=now)}
        case "plain":
            signature = Signer(PLAIN_SECRET).sign(id_, datetime.fromtimestamp(now, UTC), body.decode())
            return body, {"webhook-id": id_, "webhook-timestamp": str(now), "webhook-signature": signature}
        case _:
            return body, {"Authorization": "Bearer a-shared-secret", "Idempotency-Key": id_}


def test_the_answer_comes_before_the_model_has_said_anything(gateway: Served) -> None:
    release.clear()
    names = ("hub", "chat", "pay", "plain", "shared")
    deliveries = [(name, *slow(name, number)) for number in range(10) for name in names]
    try:
        with httpx.Client(base_url=gateway.url, timeout=60) as client, ThreadPoolExecutor(50) as pool:

            def send(one: tuple[str, bytes, dict[str, str]]) -> httpx.Response:
                return client.post(f"/v1/webhooks/{one[0]}", content=one[1], headers=one[2])

            found = list(pool.map(send, deliveries))
        assert {answer.status_code for answer in found} <= {200, 202}
        # The models hang until they are released below: no answer can have waited for one.
        states = [gateway.client.get(f"/v1/turns/{answer.json()['turn_id']}").json()["state"] for answer in found]
        assert "completed" not in states
    finally:
        release.set()


def test_a_function_that_hangs_holds_up_no_other_route(turnmill_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def hang(_: WebhookRequest) -> None:
        go_on.wait(60)

    monkeypatch.setenv("BEARER", "a-shared-secret")
    hook = Webhook("stuck", "support", BearerWebhooks("BEARER"), "bot", "dev", hang)
    agent = Agent("support", FunctionModel(think))
    with served_gateway(turnmill_redis.url, Project({"support": agent}, {"stuck": hook})) as served, ThreadPoolExecutor(64) as pool:
        headers = {"Authorization": "Bearer a-shared-secret"}
        stuck = [pool.submit(httpx.post, f"{served.url}/v1/webhooks/stuck", json={}, headers=headers, timeout=90) for _ in range(60)]
        try:
            until(lambda: served.app.state.deliveries_at_once.borrowed_tokens == routes.AT_ONCE, "all places to be taken")
            assert served.client.get("/v1/agents").status_code == 200
            assert served.client.post("/v1/agents/support/turns", json={"input": "hi"}).status_code == 202
        finally:
            go_on.set()
        assert {one.result().status_code for one in stuck} == {204}


def test_what_cannot_be_read_is_told_without_repeating_it(then: Served) -> None:
    def signed(body: bytes) -> dict[str, str]:
        return {"X-Hub-Signature-256": "sha256=" + hmac.new(b"gh-secret", body, hashlib.sha256).hexdigest(), "X-GitHub-Delivery": "odd"}

    for body in (b'{"SECRET-TEXT', b"\xffSECRET-TEXT", b'["SECRET-TEXT"]', b'{"text": {"SECRET-TEXT": 1}, "a": NaN}', b"[" * 5000):
        refused = post(then, "hub", body, signed(body))
        assert refused.status_code == 400, refused.text
        assert "SECRET-TEXT" not in refused.text


def test_a_key_of_the_gateway_opens_no_webhook(then: Served) -> None:
    key, _ = create_key(then.hand.redis, "ann", "dev", ["turns:write"])
    assert post(then, "shared", b"{}", {"Authorization": f"Bearer {key}"}).status_code == 401
    then.hand.redis.delete("tm:keys")
