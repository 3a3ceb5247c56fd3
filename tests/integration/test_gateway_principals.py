"""Who may come in, and how often: keys, tokens, tickets, rates, pages of other origins; and that no tenant sees another's."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from gateway_stage import Served, emptied, served_gateway, until

from gateway.parts import Pace
from orchestration import Agent
from orchestration.identity import key_set
from orchestration.models.scripted import FunctionModel
from orchestration.project import Project
from orchestration.state.api_keys import create_key, revoke_key
from orchestration.testing.servers import RedisServer

OLD_KEY, NEW_KEY = (rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2))
ALL = ["turns:write", "turns:read", "approvals:read", "approvals:decide"]


class Issuer(http.server.BaseHTTPRequestHandler):
    """A server with a key set."""

    keys: ClassVar[list[dict[str, Any]]] = []
    redirect: ClassVar[str] = ""
    asked: ClassVar[int] = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        if self.redirect:
            self.send_response(302)
            self.send_header("Location", self.redirect)
            self.end_headers()
            return
        body = json.dumps({"keys": self.keys}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def published(key: rsa.RSAPrivateKey, kid: str) -> dict[str, Any]:
    return dict(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)) | {"kid": kid, "use": "sig", "alg": "RS256"}


def token(key: rsa.RSAPrivateKey = OLD_KEY, kid: str = "old", **claims: Any) -> str:
    made = {
        "sub": "ann",
        "tenant": "acme",
        "scope": " ".join(ALL),
        "iss": "https://id.example",
        "aud": "turnmill",
        "exp": time.time() + 600,
    }
    return jwt.encode(made | claims, key, algorithm="RS256", headers={"kid": kid})


#: A tenant whose buckets no other run has drawn from.
RATES = f"rates-{time.monotonic_ns()}"


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def project() -> Project:
    return Project(agents={"support": Agent("support", FunctionModel(lambda messages: f"about {messages[-1]['content']}"))})


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Issuer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/jwks"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def gateway(turnmill_redis: RedisServer, issuer: str) -> Iterator[Served]:
    """A gateway that takes tokens of the issuer, and keys of the store."""
    Issuer.keys = [published(OLD_KEY, "old")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_set, "PAUSE_S", 0.0)
        settings = {"jwt_jwks": issuer, "jwt_issuer": "https://id.example", "jwt_audience": "turnmill"}
        pace = Pace(comment_s=0.2, recheck_s=0.1)
        with served_gateway(emptied(turnmill_redis), project(), pace=pace, working=True, **settings) as served:
            served.client.headers.update(bearer(token()))
            yield served


@pytest.fixture
def key(gateway: Served) -> Iterator[tuple[str, str]]:
    """A new API key of tenant acme, and its id."""
    made, known = create_key(gateway.hand.redis, "kim", "acme", ALL)
    yield made, known.key_id
    revoke_key(gateway.hand.redis, known.key_id)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


# Tokens


def test_a_token_of_the_issuer_comes_in(gateway: Served) -> None:
    made = gateway.client.post("/v1/agents/support/turns", json={"input": "hi"})
    assert made.status_code == 202
    assert gateway.client.get(f"/v1/turns/{made.json()['turn_id']}").status_code == 200


def test_one_that_does_not_hold_comes_nowhere(gateway: Served) -> None:
    for wrong in (
        token(NEW_KEY),
        token(exp=time.time() - 1),
        token(aud="web"),
        token(iss="https://evil.example"),
        token(kid="unknown"),
        jwt.encode({"sub": "ann", "tenant": "acme", "exp": time.time() + 60}, "x" * 32, algorithm="HS256"),
        jwt.encode({"sub": "ann", "tenant": "acme", "exp": time.time() + 60}, None, algorithm="none"),
    ):
        refused = gateway.client.get("/v1/agents", headers=bearer(wrong))
        assert code(refused) == (401, "unauthorized")
        assert wrong not in refused.text


def test_a_key_that_the_issuer_changed_to_is_found(gateway: Served) -> None:
    assert code(gateway.client.get("/v1/agents", headers=bearer(token(NEW_KEY, "new")))) == (401, "unauthorized")
    Issuer.keys = [published(OLD_KEY, "old"), published(NEW_KEY, "new")]
    assert gateway.client.get("/v1/agents", headers=bearer(token(NEW_KEY, "new"))).status_code == 200
    assert gateway.client.get("/v1/agents", headers=bearer(token())).status_code == 200


def test_a_redirect_of_the_issuer_is_not_followed(issuer: str) -> None:
    Issuer.redirect = issuer
    try:
        before = Issuer.asked
        assert key_set.KeySet(issuer).keys("old", "RS256") == []
        assert Issuer.asked - before <= 3
    finally:
        Issuer.redirect = ""


# Keys


def test_a_key_is_void_at_once_when_it_is_revoked(gateway: Served, key: tuple[str, str]) -> None:
    assert gateway.client.get("/v1/agents", headers=bearer(key[0])).status_code == 200
    revoke_key(gateway.hand.redis, key[1])
    assert code(gateway.client.get("/v1/agents", headers=bearer(key[0]))) == (401, "unauthorized")


def test_a_stream_ends_when_its_key_is_revoked(gateway: Served, key: tuple[str, str]) -> None:
    number = gateway.hand.write("cv_revoked", "tn_revoked", "x")
    assert number
    gateway.hand.redis.hset("tm:acme:conv:cv_revoked", "agent", "support")
    with gateway.client.stream("GET", "/v1/conversations/cv_revoked/frames", headers=bearer(key[0])) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith(":")
        revoke_key(gateway.hand.redis, key[1])
        rest = list(lines)
    assert json.loads(rest[-2].removeprefix("data: "))["code"] == "unauthorized"


def test_only_a_keys_hash_is_kept(gateway: Served, key: tuple[str, str]) -> None:
    redis = gateway.hand.redis
    for name in redis.scan_iter("*"):
        stored = redis.dump(str(name)) if redis.type(name) != "stream" else b""
        assert key[0] not in repr(stored) and key[0] not in str(name)


# Tickets


def ticket_of(served: Served, headers: dict[str, str] | None = None) -> str:
    answer = served.client.post("/v1/tickets", headers=headers)
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"ticket", "expires_at"}
    return str(answer.json()["ticket"])


def turn_of(served: Served, headers: dict[str, str] | None = None) -> str:
    made = served.client.post("/v1/agents/support/turns", json={"input": "hi"}, headers=headers).json()
    until(lambda: served.client.get(f"/v1/turns/{made['turn_id']}", headers=headers).json()["state"] == "completed", "the turn to end")
    return str(made["turn_id"])


def test_a_browser_watches_with_a_ticket_once(gateway: Served) -> None:
    path = f"/v1/turns/{turn_of(gateway)}/frames"
    ticket = ticket_of(gateway)
    with httpx.Client(base_url=gateway.url) as browser:
        for wrong in ({"token": token()}, {"access_token": token()}, {"ticket": "tkt_unknown"}, {"ticket": ""}, {"ticket": token()[:90]}):
            assert code(browser.get(path, params=wrong)) == (401, "unauthorized")
        watched = browser.get(path, params={"ticket": ticket})
        assert watched.status_code == 200 and "event: done" in watched.text
        assert code(browser.get(path, params={"ticket": ticket})) == (401, "unauthorized")


def test_a_ticket_that_is_a_minute_old_is_none(gateway: Served) -> None:
    path = f"/v1/turns/{turn_of(gateway)}/frames"
    ticket = ticket_of(gateway)
    (kept,) = gateway.hand.redis.keys("tm:ticket:*")
    assert 55_000 < gateway.hand.redis.pttl(kept) <= 60_000
    gateway.hand.redis.pexpire(kept, 1)
    until(lambda: not gateway.hand.redis.exists(kept), "its minute to be over")
    assert code(httpx.get(gateway.url + path, params={"ticket": ticket})) == (401, "unauthorized")


def test_a_ticket_has_the_rights_of_who_got_it_and_only_while_they_last(gateway: Served, key: tuple[str, str]) -> None:
    path = f"/v1/turns/{turn_of(gateway)}/frames"
    stranger = ticket_of(gateway, bearer(token(tenant="rival")))
    assert code(httpx.get(gateway.url + path, params={"ticket": stranger})) == (404, "not_found")
    blind = ticket_of(gateway, bearer(token(scope="turns:write")))
    assert code(httpx.get(gateway.url + path, params={"ticket": blind})) == (403, "forbidden")
    revoked = ticket_of(gateway, bearer(key[0]))
    revoke_key(gateway.hand.redis, key[1])
    assert code(httpx.get(gateway.url + path, params={"ticket": revoked})) == (401, "unauthorized")
    assert code(httpx.post(gateway.url + "/v1/tickets")) == (401, "unauthorized")


def test_a_ticket_opens_streams_and_nothing_else(gateway: Served) -> None:
    for method, path in (("GET", "/v1/agents"), ("POST", "/v1/agents/support/turns"), ("POST", "/v1/tickets"), ("GET", "/v1/approvals")):
        answer = httpx.request(
            method, gateway.url + path, params={"ticket": ticket_of(gateway)}, json={"input": "x"} if method == "POST" else None
        )
        assert code(answer) == (401, "unauthorized")


# Tenants


def test_nothing_of_a_tenant_is_there_for_another(gateway: Served) -> None:
    mine, stranger = bearer(token()), bearer(token(sub="eve", tenant="rival"))
    body = {"input": "mine", "conversation_id": "shared-name"}
    made = gateway.client.post("/v1/agents/support/turns", json=body, headers={**mine, "Idempotency-Key": "k"}).json()
    theirs = gateway.client.post("/v1/agents/support/turns", json=body, headers={**stranger, "Idempotency-Key": "k"}).json()
    assert made["turn_id"] != theirs["turn_id"], "an idempotency key reached across tenants"
    turn, conversation = f"/v1/turns/{made['turn_id']}", "/v1/conversations/shared-name"
    until(lambda: gateway.client.get(turn, headers=mine).json()["state"] == "completed", "the turn to end")
    for method, path in (
        ("GET", turn),
        ("GET", f"{turn}/frames"),
        ("POST", f"{turn}/cancel"),
        ("POST", f"{turn}/calls/tc_1/cancel"),
        ("GET", "/v1/approvals/ap_1"),
        ("POST", "/v1/approvals/ap_1/decision"),
    ):
        answer = gateway.client.request(method, path, headers=stranger, json={"approved": True} if method == "POST" else None)
        assert answer.status_code == 404, (method, path)
    history = gateway.client.get(f"{conversation}/history", headers=stranger).json()["history"]
    assert {entry["turn_id"] for entry in history} == {theirs["turn_id"]}
    completion = {"model": "support", "messages": [{"role": "user", "content": "hi"}], "metadata": {"conversation_id": "shared-name"}}
    gateway.client.post("/v1/chat/completions", json=completion, headers=stranger)
    assert len(gateway.client.get(f"{conversation}/history", headers=mine).json()["history"]) == 2


# Rates


def test_who_asks_too_much_is_told_when_to_come_back(turnmill_redis: RedisServer) -> None:
    keys = json.dumps(
        [{"key": f"key-of-somebody-{name}", "sub": name, "tenant": RATES, "scopes": ALL} for name in ("busy", "calm")]
        + [{"key": "key-of-a-namesake", "sub": "busy", "tenant": "elsewhere", "scopes": ALL}]
    )
    with served_gateway(turnmill_redis.url, project(), api_keys=keys, rate_per_s=0.5, rate_burst=5) as served:
        busy, calm = bearer("key-of-somebody-busy"), bearer("key-of-somebody-calm")
        found = [served.client.get("/v1/agents", headers=busy) for _ in range(6)]
        assert [answer.status_code for answer in found] == [200] * 5 + [429]
        assert [int(answer.headers["ratelimit-remaining"]) for answer in found] == [4, 3, 2, 1, 0, 0]
        assert {answer.headers["ratelimit-limit"] for answer in found} == {"5"}
        assert {answer.headers["ratelimit-policy"] for answer in found} == {"5;w=10"}
        refused = found[-1]
        assert code(refused) == (429, "rate_limited")
        assert 1 <= int(refused.headers["retry-after"]) <= 2
        assert "ask again in" in refused.json()["detail"]
        assert served.client.get("/v1/agents", headers=calm).status_code == 200
        assert served.client.get("/v1/agents", headers=bearer("key-of-a-namesake")).status_code == 200
        until(lambda: served.client.get("/v1/agents", headers=busy).status_code == 200, "the bucket to fill")
        assert served.client.get("/healthz").status_code == 200


def test_two_gateways_share_the_buckets(turnmill_redis: RedisServer) -> None:
    keys = json.dumps([{"key": "key-of-somebody-shared", "sub": "shared", "tenant": RATES, "scopes": ALL}])
    settings: dict[str, Any] = {"api_keys": keys, "rate_per_s": 0.01, "rate_burst": 4}
    with (
        served_gateway(turnmill_redis.url, project(), **settings) as one,
        served_gateway(turnmill_redis.url, project(), **settings) as other,
    ):
        statuses = [served.client.get("/v1/agents", headers=bearer("key-of-somebody-shared")).status_code for served in (one, other) * 3]
    assert statuses == [200] * 4 + [429] * 2


# Pages


def test_pages_of_other_origins_may_not_call_unless_their_origin_is_named(gateway: Served, turnmill_redis: RedisServer) -> None:
    asked = {
        "Origin": "https://app.example.com",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    closed = gateway.client.options("/v1/agents/support/turns", headers=asked)
    assert "access-control-allow-origin" not in closed.headers
    keys = json.dumps([{"key": "key-of-somebody-else", "sub": "a", "tenant": "t", "scopes": ALL}])
    with served_gateway(turnmill_redis.url, project(), api_keys=keys, cors_origins=("https://app.example.com",)) as served:
        opened = served.client.options("/v1/agents/support/turns", headers=asked)
        assert opened.headers["access-control-allow-origin"] == "https://app.example.com"
        assert "access-control-allow-credentials" not in opened.headers
        other = served.client.options("/v1/agents/support/turns", headers={**asked, "Origin": "https://evil.example.com"})
        assert "access-control-allow-origin" not in other.headers
        answer = served.client.get("/v1/agents", headers={**bearer("key-of-somebody-else"), "Origin": "https://app.example.com"})
        assert answer.headers["access-control-allow-origin"] == "https://app.example.com"
        assert "ratelimit-remaining" in answer.headers["access-control-expose-headers"].lower()


def test_every_answer_has_the_headers_that_protect_a_browser(gateway: Served) -> None:
    for path in ("/v1/agents", "/v1/nothing", "/healthz", "/", "/openapi.json", "/metrics"):
        headers = gateway.client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers or headers["server"] == "uvicorn"
    assert "strict-transport-security" not in gateway.client.get("/").headers


def test_a_gateway_reached_over_tls_says_so(turnmill_redis: RedisServer) -> None:
    with served_gateway(turnmill_redis.url, project(), public_url="https://turnmill.example.com") as served:
        assert served.client.get("/healthz").headers["strict-transport-security"].startswith("max-age=")
