"""`python -m benchmarks.approvals`: what a waiting approval costs in Redis, and whether deciding the oldest of many takes longer.

One process, the real journal on a Redis server of its own. Read the bytes, and the ratio in the last column.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestration import Agent, Gate, ModelReply, RequestedCall, tool
from orchestration.actions import read
from orchestration.actions.decide import decide
from orchestration.actions.submit import Submission, submit
from orchestration.core.principal import DEVELOPER
from orchestration.project import collect
from orchestration.settings import Settings
from orchestration.state.store import Store
from orchestration.steps.plan import plan
from orchestration.steps.tool import tool as tool_step
from orchestration.testing.local import LocalMesh, LocalQueue
from orchestration.testing.servers import redis_server
from orchestration.wiring import Ports, make_ports

#: How often each operation is timed.
TIMES = 50

#: Kinds of keys, by what stands in their names.
KINDS = {":ap:": "approval", ":turn:": "turn (journal)", ":frames": "frames", ":log": "conversation's log", ":conv:": "conversation"}


@tool("billing/refund", approval="moves real money")
def refund(order_id: str, amount: float, why: str = "") -> dict[str, Any]:
    """Refund an order: the amount goes back to the customer who placed it."""
    return {"refunded": amount}


class Asks:
    """A model that asks for one refund."""

    model = "asks"

    def complete(self, messages: Sequence[dict[str, Any]], *, tools: Any = None) -> ModelReply:
        return ModelReply("", (RequestedCall("billing-refund", '{"order_id": "o-42", "amount": 40.0, "why": "arrived broken"}'),))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", type=int, default=10_000, help="approvals that wait at once")
    options = parser.parse_args()
    console = Console()
    with redis_server(appendonly="off") as server:
        settings = Settings(redis_url=server.url)
        queue = LocalQueue()
        agent = Agent("support", Asks(), tools=[refund], approvals={"billing/refund": Gate(roles=["ops"], timeout_s=30 * 86_400)})
        ports = make_ports(settings, collect([agent], "benchmark"), Store(settings), queue, LocalMesh([refund]))
        ports.lease.register()
        _wait(ports, queue, TIMES + 5)  # the first ones also pay for scripts and connections
        few = _timed(ports)
        ports.store.client.flushdb()
        ports.lease.register(instead_of=ports.lease.process)
        before = _used_memory(ports)
        _wait(ports, queue, options.waiting, console)
        each = (_used_memory(ports) - before) / options.waiting
        console.print(f"\n{options.waiting} waiting approvals: [bold]{each:,.0f} bytes each[/bold] in Redis, all that belongs to them\n")
        console.print(_sizes(ports))
        many = _timed(ports)
        console.print(_compared(few, many, options.waiting))


def _wait(ports: Ports, queue: LocalQueue, count: int, console: Console | None = None) -> None:
    """Let so many turns come to wait for a human, each in a conversation of its own."""
    for number in range(count):
        submitted = submit(ports, Submission("support", "My order o-42 arrived broken, please refund it.", DEVELOPER))
        queue.waiting.clear()
        queue.sent.clear()
        plan(_step(submitted.turn_id, "plan"), ports)
        tool_step(_step(submitted.turn_id, "tool"), ports)
        ports.store.client.set(f"celery-taskset-meta-{submitted.turn_id}.1.s", 1)  # what Celery keeps of the open chord
        if console is not None and (number + 1) % 2000 == 0:
            console.print(f"{number + 1} wait", style="dim")


def _step(turn_id: str, kind: str) -> Any:
    from orchestration.core.ids import StepId, StepKind

    return StepId(DEVELOPER.tenant, turn_id, 1, StepKind(kind), 0)


def _used_memory(ports: Ports) -> int:
    info: Any = ports.store.client.info("memory")
    return int(info["used_memory"])


def _sizes(ports: Ports) -> Table:
    client: Any = ports.store.client
    table = Table("key", "bytes", box=None)
    seen: dict[str, int] = {}
    for name in client.scan_iter(count=1000):
        kind = next((kind for part, kind in KINDS.items() if part in name), None)
        if kind is not None and kind not in seen:
            seen[kind] = client.memory_usage(name, samples=0)
        if len(seen) == len(KINDS):
            break
    for kind, size in sorted(seen.items(), key=lambda one: -one[1]):
        table.add_row(kind, f"{size:,}")
    return table


def _timed(ports: Ports) -> dict[str, float]:
    """Milliseconds of the median operation."""
    tenant = DEVELOPER.tenant
    found: dict[str, float] = {"list a page of 100": _median(lambda: read.approvals(ports, tenant, limit=100))}
    oldest = [one["approval_id"] for one in read.approvals(ports, tenant, limit=TIMES)["approvals"]]
    found["decide the oldest"] = _median(lambda: decide(ports, DEVELOPER, oldest.pop(0), False))
    return found


def _median(work: Callable[[], object], times: int = TIMES) -> float:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        took.append((time.perf_counter() - began) * 1000)
    return sorted(took)[times // 2]


def _compared(few: dict[str, float], many: dict[str, float], waiting: int) -> Table:
    table = Table("operation", f"ms, {TIMES + 5} wait", f"ms, {waiting} wait", "ratio", box=None)
    for name, took in many.items():
        table.add_row(name, f"{few[name]:.2f}", f"{took:.2f}", f"{took / few[name]:.2f}")
    return table


if __name__ == "__main__":
    main()
