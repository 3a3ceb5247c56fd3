"""The examples of webhooks, each with its sender's requests and a stand-in for its sender's API: a message in, the answer out."""

from __future__ import annotations

import hashlib
import hmac
import http.server
import importlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlencode

import httpx
import pytest
from gateway_stage import Served, emptied, served_gateway, until
from slack_sdk.signature import SignatureVerifier
from standardwebhooks.webhooks import Webhook as Signer
from twilio.request_validator import RequestValidator

from orchestration.models.scripted import FunctionModel
from orchestration.project import Project, collect
from orchestration.testing.servers import RedisServer

SECRETS = {
    "SHOP_SECRET": "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",
    "GITHUB_WEBHOOK_SECRET": "gh-secret",
    "GITHUB_TOKEN": "gh-token",
    "SLACK_SIGNING_SECRET": "sl-secret",
    "SLACK_BOT_TOKEN": "xoxb-token",
    "TWILIO_AUTH_TOKEN": "tw-token",
    "TWILIO_ACCOUNT_SID": "AC1",
}


@dataclass
class Call:
    """One call that a reply function made."""

    path: str
    headers: dict[str, str]
    body: str


class Outside(http.server.BaseHTTPRequestHandler):
    """The services' APIs, all in one: they take everything and say that it is fine."""

    calls: ClassVar[list[Call]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.calls.append(Call(self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(200)
        self.send_header("Content-Length", "12")
        self.end_headers()
        self.wfile.write(b'{"ok": true}')

    def log_message(self, *_: Any) -> None:
        pass


@dataclass
class Stage:
    """The served examples, and the world around them."""

    served: Served

    def post(self, name: str, body: str, headers: dict[str, str]) -> httpx.Response:
        return self.served.client.post(f"/v1/webhooks/{name}", content=body, headers=headers)

    def said(self, path: str) -> Call:
        until(lambda: any(call.path == path for call in Outside.calls), f"a call of {path}")
        return next(call for call in Outside.calls if call.path == path)


def project() -> Project:
    declared: list[Any] = []
    for name in ("signed_json", "github_issues", "slack_mentions", "sms"):
        declared += vars(importlib.import_module(f"examples.webhooks.{name}")).values()
    found = collect(declared, "the examples")
    model = FunctionModel(lambda messages: f"about {messages[-1]['content']}")
    return replace(found, agents={name: replace(agent, model=model) for name, agent in found.agents.items()})


@pytest.fixture(scope="module")
def stage(turnmill_redis: RedisServer) -> Iterator[Stage]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Outside)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    outside = f"http://127.0.0.1:{server.server_address[1]}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (SECRETS | dict.fromkeys(("GITHUB_API_URL", "SLACK_API_URL", "TWILIO_API_URL"), outside)).items():
            patch.setenv(name, value)
        with served_gateway(emptied(turnmill_redis), project(), working=True) as served:
            yield Stage(served)
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_failed_order_becomes_a_turn_and_other_events_none(stage: Stage) -> None:
    def deliver(id_: str, event: dict[str, Any]) -> httpx.Response:
        body, now = json.dumps(event), datetime.now(UTC)
        signature = Signer(SECRETS["SHOP_SECRET"]).sign(id_, now, body)
        headers = {"webhook-id": id_, "webhook-timestamp": str(int(now.timestamp())), "webhook-signature": signature}
        return stage.post("orders", body, headers)

    assert deliver("m1", {"type": "order.paid", "order": "o-1"}).status_code == 204
    taken = deliver("m2", {"type": "order.failed", "order": "o-1", "why": "no stock"})
    assert (taken.status_code, taken.json()["conversation_id"]) == (202, "o-1")


def test_a_new_issue_gets_a_comment(stage: Stage) -> None:
    event = {
        "action": "opened",
        "issue": {"number": 7, "title": "It fails", "body": None},
        "repository": {"full_name": "acme/shop"},
    }
    body = json.dumps(event)
    headers = {
        "X-Hub-Signature-256": "sha256=" + hmac.new(b"gh-secret", body.encode(), hashlib.sha256).hexdigest(),
        "X-GitHub-Delivery": "d-1",
        "X-GitHub-Event": "issues",
    }
    assert stage.post("github", body, headers).status_code == 202
    call = stage.said("/repos/acme/shop/issues/7/comments")
    assert json.loads(call.body)["body"].startswith("about It fails")
    assert call.headers["authorization"] == "Bearer gh-token"
    assert stage.post("github", body, {**headers, "X-GitHub-Event": "push", "X-GitHub-Delivery": "d-2"}).status_code == 204


def test_a_mention_is_answered_in_its_thread(stage: Stage) -> None:
    def deliver(event: dict[str, Any]) -> httpx.Response:
        body, now = json.dumps({"type": "event_callback", "event_id": f"Ev-{event['ts']}", "event": event}), str(int(time.time()))
        signature = SignatureVerifier("sl-secret").generate_signature(timestamp=now, body=body)
        return stage.post("slack", body, {"X-Slack-Request-Timestamp": now, "X-Slack-Signature": str(signature)})

    mention = {"type": "app_mention", "channel": "C1", "ts": "17.1", "text": "<@U0BOT> how are sales?"}
    assert deliver(mention).status_code == 200
    sent = json.loads(stage.said("/chat.postMessage").body)
    assert sent == {"channel": "C1", "thread_ts": "17.1", "text": "about how are sales?"}
    assert deliver({**mention, "ts": "17.2", "bot_id": "B1"}).content == b""


def test_a_text_message_is_answered_by_one(stage: Stage) -> None:
    form = {"MessageSid": "SM1", "From": "+4930123", "To": "+4930999", "Body": "open today?"}
    signature = RequestValidator("tw-token").compute_signature(f"{stage.served.url}/v1/webhooks/sms", form)
    headers = {"X-Twilio-Signature": signature, "Content-Type": "application/x-www-form-urlencoded"}
    for _ in range(2):
        assert stage.post("sms", urlencode(form), headers).status_code == 200
    call = stage.said("/2010-04-01/Accounts/AC1/Messages.json")
    assert parse_qs(call.body) == {"To": ["+4930123"], "From": ["+4930999"], "Body": ["about open today?"]}
    assert sum(one.path == call.path for one in Outside.calls) == 1
