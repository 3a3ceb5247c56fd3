"""How long it takes from a decision to its tool's result, and from kill -9 of a worker until its step runs again;
beside one round trip to Redis in the same run."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from rich.console import Console
from rich.table import Table

from orchestration.actions import read
from orchestration.actions.decide import decide
from orchestration.actions.submit import Submission, submit
from orchestration.core.principal import DEVELOPER
from orchestration.settings import Settings
from orchestration.testing.parts import wait_until
from orchestration.testing.servers import redis_server
from orchestration.testing.stack import Stack
from orchestration.wiring import Ports, open_ports

ROUNDS = 60
KILLS = 8


def main() -> None:
    """Measure and print a table."""
    console = Console(width=120)
    directory = Path(tempfile.mkdtemp(prefix="turnmill-bench-"))
    os.environ["LEDGER_DIR"] = str(directory)
    with (
        redis_server(appendonly="everysec") as server,
        Stack(
            "tests.fixtures.ledger_agents",
            ["tests.fixtures.ledger_tools"],
            processes=("mesh", "tools", "worker", "control"),
            redis=server,
            env={"LEDGER_DIR": str(directory), "TURNMILL_MESH_SECRET": ""},
        ) as stack,
    ):
        os.environ["TURNMILL_REDIS_URL"] = server.url
        ports = open_ports(Settings(redis_url=server.url, agents="tests.fixtures.ledger_agents", mesh_connect=(stack.mesh_endpoint,)))
        plain: Any = redis.Redis.from_url(server.url, decode_responses=True)
        rows = {
            "one round trip to Redis": [_timed(plain.ping) for _ in range(500)],
            "decision to its tool's result": [_decision(ports, plain, n) for n in range(ROUNDS)][5:],
            "kill -9 of a worker to its step running again": [_kill(stack, ports, directory, n) for n in range(KILLS)],
        }
        ports.mesh.close()
        ports.store.close()
    table = Table(title="append-only file: everysec")
    for column in ("what", "p50 ms", "p95 ms", "times"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for what, times in rows.items():
        ordered = sorted(times)
        table.add_row(
            what, f"{statistics.median(ordered) * 1000:.2f}", f"{ordered[int(len(ordered) * 0.95)] * 1000:.2f}", str(len(ordered))
        )
    console.print(table)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _script(name: str, **more: Any) -> str:
    return json.dumps({"name": name, **more})


def _decision(ports: Ports, plain: Any, number: int) -> float:
    key = f"d{number}"
    turn = submit(ports, Submission("ledger", _script(key, rounds=[[["pay", {"key": key}]]]), DEVELOPER))
    wait_until(lambda: read.turn(ports, "dev", turn.turn_id)["state"] == "waiting", "the turn to wait")
    approval = read.turn(ports, "dev", turn.turn_id)["calls"][0]["approval_id"]
    listener = plain.pubsub()
    listener.subscribe(f"tm:dev:conv:{turn.conversation_id}:live")
    listener.get_message(timeout=2)
    start = time.perf_counter()
    decide(ports, DEVELOPER, approval, True)
    while True:
        message = listener.get_message(timeout=10)
        if message and message["type"] == "message" and '"kind":"tool_result"' in message["data"]:
            taken = time.perf_counter() - start
            listener.close()
            return taken


def _kill(stack: Stack, ports: Ports, directory: Path, number: int) -> float:
    name = f"k{number}"
    other = stack.add_replica("worker")
    submit(ports, Submission("ledger", _script(name, sleep_s=20), DEVELOPER))

    def asked() -> list[str]:
        lines = (directory / "model").read_text().splitlines() if (directory / "model").exists() else []
        return [line.split()[2] for line in lines if line.split()[0] == name]

    wait_until(lambda: bool(asked()), "the model to be asked")
    victim = stack["worker"] if asked()[0] == str(stack["worker"].pid) else other
    start = time.perf_counter()
    victim.kill()
    wait_until(lambda: len(asked()) == 2, "the step to run again")
    taken = time.perf_counter() - start
    for part in (stack["worker"], other):
        if part.running:
            part.kill()
    stack.remove(other.name)
    stack["worker"].start().wait_ready()
    return taken


if __name__ == "__main__":
    main()
