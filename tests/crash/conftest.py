"""A deployment of real processes for tests that kill some of them, and words to talk about it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestration.testing.parts import Part
from orchestration.testing.servers import RedisServer, redis_server
from orchestration.testing.stack import Stack
from tests.fixtures.ledger import Ledger

#: How long a test waits for what must happen; not a measurement.
PATIENCE_S = 60.0


class Deployment:
    """The processes, the ledger of what they did, and the gateway's API."""

    def __init__(self, stack: Stack, ledger: Ledger) -> None:
        self.stack = stack
        self.ledger = ledger
        self.http = httpx.Client(base_url=stack.url, timeout=30)

    def submit(self, name: str, *rounds: list[tuple[str, dict[str, Any]]], conversation_id: str | None = None, **script: Any) -> str:
        """Submit a turn whose model does what is said here; returns its id."""
        text = json.dumps({"name": name, "rounds": rounds, **script})
        body = {"input": text} | ({"conversation_id": conversation_id} if conversation_id else {})
        answer = self.http.post("/v1/agents/ledger/turns", json=body)
        answer.raise_for_status()
        return str(answer.json()["turn_id"])

    def turn(self, turn_id: str) -> dict[str, Any]:
        """The turn as the API shows it."""
        answer = self.http.get(f"/v1/turns/{turn_id}")
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def ended(self, turn_id: str) -> dict[str, Any]:
        """The turn once it has ended."""
        return self.until(lambda: (turn := self.turn(turn_id))["state"] in ("completed", "failed", "cancelled") and turn, "the turn to end")

    def waiting_approval(self, turn_id: str) -> dict[str, Any]:
        """The first undecided approval of a turn, once there is one."""

        def look() -> dict[str, Any] | None:
            found = [one for one in self.http.get("/v1/approvals").json()["approvals"] if one["turn_id"] == turn_id]
            return found[0] if found else None

        approval: dict[str, Any] = self.until(look, "an approval")
        return approval

    def decide(self, approval_id: str, approved: bool = True, **more: Any) -> httpx.Response:
        """Decide an approval."""
        return self.http.post(f"/v1/approvals/{approval_id}/decision", json={"approved": approved, **more})

    def frames(self, turn_id: str) -> list[dict[str, Any]]:
        """All frames of an ended turn."""
        with self.http.stream("GET", f"/v1/turns/{turn_id}/frames") as stream:
            return [json.loads(line[5:]) for line in stream.iter_lines() if line.startswith("data:")]

    def worker(self, name: str = "worker", *, fault: str = "", queues: str = "", **env: str) -> Part:
        """Start one more worker, perhaps with an armed fault point (see `steps/faults.py`) or for other `queues` than the usual ones."""
        more = {"TURNMILL_FAULT_POINT": fault, **env} if fault else env
        kept = dict(self.stack.env)
        self.stack.env.update(more)
        try:
            if not queues:
                return self.stack.add_replica(name)
            command = f"celery -A workers worker -P threads -c 8 -l INFO -Q {queues} -n {name}-{queues}@%h"
            return self.stack.add(f"{name}-{queues}", command.split(), ready=lambda log: " ready." in log)
        finally:
            self.stack.env.clear()
            self.stack.env.update(kept)

    def until(self, look: Callable[[], Any], what: str) -> Any:
        """What `look` returns, once that is true."""
        limit = time.monotonic() + PATIENCE_S
        while not (found := look()):
            if time.monotonic() > limit:
                pytest.fail(f"waited in vain for {what}\n{self.stack.logs()}")
            time.sleep(0.02)
        return found

    def forget_workers(self) -> None:
        """Kill the workers that the test started, and wait until nobody holds a step of theirs."""
        for name in self.stack.names():
            if name.startswith(("worker", "control-")):
                if self.stack[name].running:
                    self.stack[name].kill()
                self.stack.remove(name)
        if not self.stack["control"].running:
            self.stack["control"].start().wait_ready()


def started(stack: Stack, ledger: Ledger) -> Deployment:
    """A deployment whose processes are ready."""
    stack.start()
    return Deployment(stack, ledger)


def ledger_stack(redis: RedisServer, directory: Path, **env: str) -> Stack:
    """Hub, tool host, control worker and gateway around the ledger's agent; plain workers are started by the tests."""
    return Stack(
        "tests.fixtures.ledger_agents",
        ["tests.fixtures.ledger_tools"],
        processes=("mesh", "tools", "control", "gateway"),
        redis=redis,
        threads=8,
        env={"LEDGER_DIR": str(directory), **env},
    )


@pytest.fixture(scope="session")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One deployment for all tests that only lose workers; see `here`."""
    directory = tmp_path_factory.mktemp("ledger")
    with redis_server(appendonly="always") as server:
        deployment = started(ledger_stack(server, directory), Ledger(directory))
        try:
            yield deployment
        finally:
            deployment.http.close()
            deployment.stack.close()


@pytest.fixture
def here(lasting: Deployment) -> Iterator[Deployment]:
    """The lasting deployment without any plain worker; what a test starts is gone after it."""
    yield lasting
    lasting.forget_workers()


@pytest.fixture
def name() -> str:
    """A name that no other test uses, for turns and effects."""
    return f"n{uuid.uuid4().hex[:8]}"


@pytest.fixture
def deploy(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    """Starts a deployment of the test's own, for what a shared one would not survive; `redis` is a server with its append-only file."""
    directory = tmp_path / "ledger"
    directory.mkdir()
    running: list[Deployment] = []
    with redis_server(appendonly="always") as server:

        def start(*, workers: int = 0, **env: str) -> Deployment:
            deployment = started(ledger_stack(server, directory, **env), Ledger(directory))
            running.append(deployment)
            for _ in range(workers):
                deployment.worker()
            return deployment

        yield start
        for deployment in running:
            deployment.http.close()
            deployment.stack.close()
