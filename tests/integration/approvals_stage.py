"""A deployment whose agents ask humans, as real processes, and words to talk about it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestration.testing.servers import RedisServer, redis_server
from orchestration.testing.stack import Stack
from tests.fixtures.ledger import Ledger

#: How long a test waits for what must happen; not a measurement.
PATIENCE_S = 60.0

KEYS = [
    {
        "key": f"key-of-{sub}-0123456789",
        "sub": sub,
        "tenant": "acme",
        "scopes": ["turns:write", "turns:read", "approvals:read", "approvals:decide", "admin"],
    }
    for sub in ("ann", "bob", "sue")
]


class Desk:
    """A deployment, and words to talk about it."""

    def __init__(self, stack: Stack, ledger: Ledger, server: RedisServer) -> None:
        self.stack = stack
        self.ledger = ledger
        self.server = server
        self.http = httpx.Client(base_url=stack.url, timeout=30)

    def ask(self, method: str, path: str, who: str = "sue", **more: Any) -> httpx.Response:
        return self.http.request(method, path, headers={"Authorization": f"Bearer key-of-{who}-0123456789"}, **more)

    def submit(self, *calls: tuple[str, dict[str, Any]], agent: str = "desk", **more: Any) -> str:
        answer = self.ask("POST", f"/v1/agents/{agent}/turns", json={"input": json.dumps(calls), **more})
        answer.raise_for_status()
        return str(answer.json()["turn_id"])

    def turn(self, turn_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/v1/turns/{turn_id}").json()
        return found

    def waiting(self, turn_id: str) -> list[str]:
        """The approvals of a turn, once it waits for nothing else."""
        self.until(lambda: self.turn(turn_id)["state"] == "waiting", "the turn to wait")
        return [call["approval_id"] for call in self.turn(turn_id)["calls"] if "approval_id" in call]

    def ended(self, turn_id: str) -> dict[str, Any]:
        self.until(lambda: self.turn(turn_id)["ended_at"], "the turn to end")
        return self.turn(turn_id)

    def approval(self, id_: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/v1/approvals/{id_}", "ann").json()
        return found

    def decide(self, id_: str, approved: bool, who: str = "ann", **more: Any) -> httpx.Response:
        return self.ask("POST", f"/v1/approvals/{id_}/decision", who, json={"approved": approved, **more})

    def frames(self, turn_id: str, kind: str) -> list[dict[str, Any]]:
        with self.http.stream("GET", f"/v1/turns/{turn_id}/frames", headers={"Authorization": f"Bearer {KEYS[0]['key']}"}) as stream:
            found = [json.loads(line[5:]) for line in stream.iter_lines() if line.startswith("data:")]
        return [frame for frame in found if frame["kind"] == kind]

    def until(self, look: Any, what: str) -> Any:
        limit = time.monotonic() + PATIENCE_S
        while not (found := look()):
            if time.monotonic() > limit:
                pytest.fail(f"waited in vain for {what}\n{self.stack.logs()}")
            time.sleep(0.02)
        return found


@contextmanager
def desk(directory: Path) -> Iterator[Desk]:
    """The deployment, started; its Redis keeps an append-only file."""
    with redis_server(appendonly="always") as server:
        stack = Stack(
            "tests.fixtures.approval_agents",
            ["tests.fixtures.approval_tools"],
            redis=server,
            threads=8,
            env={"LEDGER_DIR": str(directory), "TURNMILL_API_KEYS": json.dumps(KEYS), "TURNMILL_RATE_PER_S": "0"},
        )
        stack.start()
        made = Desk(stack, Ledger(directory), server)
        try:
            yield made
        finally:
            made.http.close()
            stack.close()


def wire(key: str, amount: float = 5) -> tuple[str, dict[str, Any]]:
    """A call that needs a human."""
    return "desk-wire", {"key": key, "amount": amount}


def look(key: str) -> tuple[str, dict[str, Any]]:
    """A call that needs none."""
    return "desk-look", {"key": key}
