"""Turns per second and the time of a turn, beside a bare Celery chain of as many empty tasks on the same Redis and the same workers.

One turn is plan with one tool call -> tool -> answer, with a model in process that answers at once: what is measured is
Turnmill. Figures of one run on one machine; compare the ratios.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import redis
from celery import Celery, chain
from rich.console import Console
from rich.table import Table

from orchestration.actions.submit import Submission, submit
from orchestration.core.principal import DEVELOPER
from orchestration.settings import Settings
from orchestration.testing.servers import Persistence, RedisServer, redis_server
from orchestration.testing.stack import Stack
from orchestration.wiring import Ports, open_ports


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run gave. Times in milliseconds, CPU of all workers in milliseconds a turn, commands and bytes a turn at Redis."""

    per_s: float
    p50: float
    p95: float
    cpu: float
    commands: float
    sent_bytes: float


class Bench:
    """One deployment to measure."""

    def __init__(self, stack: Stack, ports: Ports) -> None:
        self.stack = stack
        self.ports = ports
        self.redis: Any = redis.Redis.from_url(stack.redis.url, decode_responses=True)
        self.app: Celery = ports.queue.app  # type: ignore[attr-defined]

    def turn(self, agent: str) -> Callable[[], str]:
        """What submits one turn and names it."""
        return lambda: submit(self.ports, Submission(agent, "go", DEVELOPER)).turn_id

    def bare(self) -> Callable[[], str]:
        """What sends one chain of three empty tasks and names it."""
        numbers = iter(range(10**9))
        step = self.app.signature("bare.step", immutable=True, queue="plan")

        def send() -> str:
            name = f"chain-{next(numbers)}"
            chain(step, step.clone(), self.app.signature("bare.last", args=(name,), immutable=True, queue="plan")).apply_async()
            return name

        return send

    def measure(self, send: Callable[[], str], count: int, concurrency: int) -> Figures:
        """Keep `concurrency` of them under way until `count` are done."""
        listener = self.redis.pubsub()
        listener.psubscribe("tm:dev:conv:*:live", "bench:done")
        for _ in range(2):
            listener.get_message(timeout=2)
        self.redis.config_resetstat()
        began: dict[str, float] = {}
        early: dict[str, float] = {}
        times: list[float] = []
        cpu = self._cpu()
        start = time.perf_counter()
        sent = 0

        def one() -> None:
            nonlocal sent
            at = time.perf_counter()
            name = send()
            sent += 1
            if name in early:
                times.append(early.pop(name) - at)
            else:
                began[name] = at

        for _ in range(min(concurrency, count)):
            one()
        while len(times) < count:
            message = listener.get_message(timeout=10)
            if message is None:
                raise RuntimeError(f"only {len(times)} of {count} were done\n{self.stack.logs()}")
            if message["type"] != "pmessage":
                continue
            data = message["data"]
            if message["channel"] != "bench:done":
                if '"kind":"done"' not in data:
                    continue
                data = data.split(" ", 2)[1]
            now = time.perf_counter()
            if data in began:
                times.append(now - began.pop(data))
            else:
                early[data] = now
            if sent < count:
                one()
        elapsed = time.perf_counter() - start
        listener.close()
        stats = self.redis.info("commandstats")
        net = self.redis.info("stats")
        times.sort()
        return Figures(
            per_s=count / elapsed,
            p50=times[len(times) // 2] * 1000,
            p95=times[int(len(times) * 0.95)] * 1000,
            cpu=(self._cpu() - cpu) * 1000 / count,
            commands=sum(value["calls"] for value in stats.values()) / count,
            sent_bytes=(net["total_net_input_bytes"] + net["total_net_output_bytes"]) / count,
        )

    def _cpu(self) -> float:
        total = 0.0
        for name in self.stack.names():
            if name.startswith("worker"):
                times = psutil.Process(self.stack[name].pid).cpu_times()
                total += times.user + times.system
        return total


@contextmanager
def bench(server: RedisServer, *, workers: int) -> Iterator[Bench]:
    """Workers, a control worker and a tool host on `server`; the submitting side is this process."""
    env = {"TURNMILL_MESH_SECRET": ""}
    with Stack(
        "benchmarks.agents", ["benchmarks.tools"], processes=("mesh", "tools", "worker", "control"), redis=server, threads=64, env=env
    ) as stack:
        for _ in range(workers - 1):
            stack.add_replica("worker")
        os.environ["TURNMILL_REDIS_URL"] = server.url  # the Celery app reads its settings when it is imported
        ports = open_ports(Settings(redis_url=server.url, agents="benchmarks.agents", mesh_connect=(stack.mesh_endpoint,)))
        yield Bench(stack, ports)
        ports.mesh.close()
        ports.store.close()


def run(console: Console, *, turns: int, persistence: Persistence, workers: int) -> None:
    """Measure on one kind of persistence and print a table."""
    table = Table(title=f"Redis append-only file: {persistence}; {workers} worker processes")
    for column in ("what", "at once", "per s", "p50 ms", "p95 ms", "CPU ms", "commands", "bytes", "of bare chain"):
        table.add_column(column, justify="left" if column == "what" else "right")
    with redis_server(appendonly=persistence) as server, bench(server, workers=workers) as here:
        kinds = {
            "bare chain of 3 empty tasks": here.bare(),
            "turn, tool in its own process": here.turn("remote"),
            "turn, worker's own tool": here.turn("own"),
        }
        for send in kinds.values():
            here.measure(send, 30, 4)
        for at_once in (1, 64):
            count = max(40, turns // 6) if at_once == 1 else turns
            reference = None
            for what, send in kinds.items():
                best = max((here.measure(send, count, at_once) for _ in range(2)), key=lambda figures: figures.per_s)
                reference = reference or best
                table.add_row(
                    what,
                    str(at_once),
                    f"{best.per_s:.0f}",
                    f"{best.p50:.1f}",
                    f"{best.p95:.1f}",
                    f"{best.cpu:.2f}",
                    f"{best.commands:.0f}",
                    f"{best.sent_bytes:.0f}",
                    f"{best.per_s / reference.per_s:.2f}",
                )
    console.print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=600, help="turns of each kind at 64 at once")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--persistence", nargs="*", default=["off", "everysec", "always"], choices=["off", "everysec", "always"])
    arguments = parser.parse_args()
    console = Console(width=140)
    for persistence in arguments.persistence:
        run(console, turns=arguments.turns, persistence=persistence, workers=arguments.workers)


if __name__ == "__main__":
    main()
