"""A caller's own token on its whole way, through real processes: from each door of the gateway to an Istos node that checks it, and nowhere
else. What Redis is told meanwhile, broker included, is listened to."""

from __future__ import annotations

import base64
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jwt
import openai
import pytest
import redis
from istos import Istos
from istos.security.authz import JWTAuthorizer
from websockets.sync.client import connect

from orchestration.testing.servers import RedisServer, redis_server
from orchestration.testing.stack import Stack
from tests.integration.mesh_stage import istos_node, until

pytestmark = pytest.mark.slow

SECRET = "the-secret-of-an-identity-provider-more-than-32-bytes"
KEY = "key-of-a-program-0123456789"
SCOPES = ["turns:write", "turns:read", "approvals:read", "approvals:decide", "admin"]
AUDIENCE = "turnmill"


def token(sub: str, *, for_s: float = 600) -> str:
    claims = {
        "sub": sub,
        "tenant": "acme",
        "scope": " ".join(SCOPES),
        "aud": AUDIENCE,
        "exp": time.time() + for_s,
        "nonce": secrets.token_hex(8),
    }
    return jwt.encode(claims, SECRET, algorithm="HS256")


class Deployment:
    """The processes, what the node on the mesh was shown, and all that Redis was told."""

    def __init__(self, stack: Stack, server: RedisServer) -> None:
        self.stack = stack
        self.url = stack.url
        self.shown: list[str] = []
        self.issued: list[str] = []
        self.told: list[str] = []
        self._monitor = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2].partition("/")[0])))
        self._monitor.sendall(b"MONITOR\r\n")
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        until(lambda: self.told)

    def _listen(self) -> None:
        with self._monitor.makefile("r", errors="replace") as lines:
            self.told.extend(iter(lines.readline, ""))

    def close(self) -> None:
        self._monitor.shutdown(socket.SHUT_RDWR)
        self._listener.join(20)
        self._monitor.close()

    def as_(self, sub: str, *, for_s: float = 600) -> dict[str, str]:
        self.issued.append(token(sub, for_s=for_s))
        return {"Authorization": f"Bearer {self.issued[-1]}"}

    def ask(self, agent: str, *tools: str, headers: dict[str, str]) -> dict[str, Any]:
        body = {"input": said(*tools)}
        with httpx.Client(base_url=self.url, headers=headers, timeout=90) as client:
            answer = client.post(f"/v1/agents/{agent}/turns", json=body, headers={"Prefer": "wait=60"})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def logs(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self.stack.directory.glob("*.log"))


def said(*tools: str) -> str:
    return json.dumps([[f"vault-{tool}", {}] for tool in tools])


@pytest.fixture(scope="module")
def here() -> Iterator[Deployment]:
    keys = [{"key": KEY, "sub": "program", "tenant": "acme", "scopes": SCOPES}]
    env = {
        "TURNMILL_JWT_SECRET": SECRET,
        "TURNMILL_JWT_AUDIENCE": AUDIENCE,
        "TURNMILL_API_KEYS": json.dumps(keys),
        "TURNMILL_TOKEN_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
        "TURNMILL_MESH_CALLER_TOKENS": "true",
    }
    with (
        redis_server() as server,
        Stack("tests.fixtures.forwarding_agents", ["tests.fixtures.forwarding_tools"], redis=server, env=env) as stack,
    ):
        made = Deployment(stack, server)
        check = JWTAuthorizer(secret=SECRET, audience=AUDIENCE)

        def guard(context: Any) -> Any:
            made.shown.append(context.token or "")
            return check(context)

        def declare(app: Istos) -> None:
            @app.handle("vault/read", authorizer=guard)
            async def read() -> str:
                return "the node ran"

            @app.handle("vault/gated", authorizer=guard)
            async def gated() -> str:
                return "the gated one ran"

        with istos_node(stack.mesh_endpoint, "vault", declare):
            yield made
        made.close()


def test_the_node_is_asked_in_the_callers_name_and_so_is_a_host_of_ours(here: Deployment) -> None:
    ann = here.as_("ann")
    turn = here.ask("trusted", "read", "ours", headers=ann)
    assert turn["answer"] == "the node ran; ours ran"
    assert here.shown == [here.issued[-1]]
    here.shown.clear()


def test_nobody_elses_token_is_shown_where_the_agent_does_not_forward_or_there_is_only_a_key(here: Deployment) -> None:
    for agent, headers in (("plain", here.as_("ann")), ("trusted", {"Authorization": f"Bearer {KEY}"})):
        turn = here.ask(agent, "read", "ours", headers=headers)
        assert [call["state"] for call in turn["calls"]] == ["failed", "completed"], "the node knows only its own provider's tokens"
        assert turn["calls"][0]["error"]["code"] == "unauthorized"
        [shown] = here.shown
        claims = jwt.decode(shown, options={"verify_signature": False})
        assert claims["aud"] == "vault/read" and shown not in here.issued, "signed by Turnmill, for this key alone"
        here.shown.clear()


def test_each_door_brings_it(here: Deployment) -> None:
    base = here.url.replace("http", "ws", 1)
    ann = here.as_("ann")
    with connect(f"{base}/v1/agents/trusted/channel", additional_headers=ann) as channel:
        channel.send(json.dumps({"text": said("read")}))
        assert answer_on(channel) == "the node ran"
    ticket = httpx.post(f"{here.url}/v1/tickets", headers=ann).json()["ticket"]
    with connect(f"{base}/v1/agents/trusted/channel?ticket={ticket}") as channel:
        channel.send(json.dumps({"text": said("read")}))
        assert answer_on(channel) == "the node ran"
    with openai.OpenAI(base_url=f"{here.url}/v1", api_key=here.issued[-1]) as client:
        completion = client.chat.completions.create(model="trusted", messages=[{"role": "user", "content": said("read")}])
    assert completion.choices[0].message.content == "the node ran"
    assert here.shown == [here.issued[-1]] * 3
    here.shown.clear()


def answer_on(channel: Any) -> str:
    while True:
        heard = json.loads(channel.recv(timeout=60))
        if heard["kind"] == "message":
            return str(heard["content"])


def test_one_that_expires_while_a_human_decides_is_told_to_the_model(here: Deployment) -> None:
    ann, bob = here.as_("ann", for_s=10), here.as_("bob")
    with httpx.Client(base_url=here.url, headers=bob, timeout=30) as client:
        turn_id = client.post("/v1/agents/trusted/turns", json={"input": said("gated")}, headers=ann).json()["turn_id"]
        until(lambda: client.get(f"/v1/turns/{turn_id}").json()["state"] == "waiting")
        approval = next(one for one in client.get("/v1/approvals").json()["approvals"] if one["turn_id"] == turn_id)
        ends = jwt.decode(ann["Authorization"].split()[1], options={"verify_signature": False})["exp"]
        until(lambda: time.time() > ends)
        assert client.post(f"/v1/approvals/{approval['approval_id']}/decision", json={"approved": True}).status_code == 200
        until(lambda: client.get(f"/v1/turns/{turn_id}").json()["state"] == "completed")
        turn = client.get(f"/v1/turns/{turn_id}").json()
        assert turn["calls"][0]["error"]["code"] == "unauthorized" and "expired" in turn["answer"]
        assert here.shown == [], "the tool was not asked in another name"
        audit = client.get("/v1/audit", params={"turn_id": turn_id}).json()["entries"]
        assert audit[-1]["event"] == "not_run"
        assert not any(issued in json.dumps(audit) for issued in here.issued)


def test_no_process_wrote_it_down(here: Deployment) -> None:
    with redis.Redis.from_url(here.stack.redis.url, decode_responses=True) as client:
        until(lambda: not list(client.scan_iter("tm:*:turn:*:token")))
        client.set("the last of what is told", "")
        until(lambda: any("the last of what is told" in command for command in here.told[-200:]))
    told, logs = "\n".join(here.told), here.logs()
    assert "turn.tool" in told
    for issued in here.issued:
        signature = issued.rpartition(".")[2]
        assert signature not in told and signature not in logs
