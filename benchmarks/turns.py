"""Turns per second and the time of a turn, beside a bare Celery chain of as many empty tasks on the same Redis and the same workers.

One turn is plan with one tool call -> tool -> answer, with a model in process that answers at once: what is measured is
Turnmill. The same chain runs on workers with Celery's own settings too, which is what others measure. Figures of one run on
one machine; compare the ratios.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import redis
from celery import Celery, chain
from rich.console import Console
from rich.table import Table

from benchmarks.stock import app as stock_app
from orchestration.actions.submit import Submission, submit
from orchestration.core.principal import DEVELOPER
from orchestration.settings import Settings
from orchestration.testing.servers import Persistence, RedisServer, redis_server
from orchestration.testing.stack import Stack
from orchestration.wiring import Ports, open_ports

#: Threads of each worker process.
THREADS = 64

#: How long Flower is given to find the workers and switch their events on, in seconds.
FLOWER_S = 6.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run gave: times, and the CPU of all workers and of Redis a turn, in milliseconds; commands and bytes at Redis a turn."""

    per_s: float
    p50: float
    p95: float
    cpu: float
    redis_cpu: float
    commands: float
    sent_bytes: float


class Bench:
    """One deployment to measure."""

    def __init__(self, stack: Stack, ports: Ports) -> None:
        self.stack = stack
        self.ports = ports
        self.redis: Any = redis.Redis.from_url(stack.redis.url, decode_responses=True)
        self.redis_process = psutil.Process(self.redis.info("server")["process_id"])
        self.app: Celery = ports.queue.app  # type: ignore[attr-defined]

    def turn(self, agent: str) -> Callable[[], str]:
        """What submits one turn and names it."""
        return lambda: submit(self.ports, Submission(agent, "go", DEVELOPER)).turn_id

    def bare(self, app: Celery) -> Callable[[], str]:
        """What sends one chain of three empty tasks with `app` and names it."""
        numbers = iter(range(10**9))
        app.conf.broker_url = app.conf.result_backend = self.stack.redis.url
        queue = app.conf.task_default_queue
        step = app.signature("bare.step", immutable=True, queue=queue)

        def send() -> str:
            name = f"chain-{app.main}-{next(numbers)}"
            chain(step, step.clone(), app.signature("bare.last", args=(name,), immutable=True, queue=queue)).apply_async()
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
        cpu, redis_cpu = self._cpu(), _cpu_of(self.redis_process)
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
            redis_cpu=(_cpu_of(self.redis_process) - redis_cpu) * 1000 / count,
            commands=sum(value["calls"] for value in stats.values()) / count,
            sent_bytes=(net["total_net_input_bytes"] + net["total_net_output_bytes"]) / count,
        )

    def _cpu(self) -> float:
        workers = [name for name in self.stack.names() if name.startswith(("worker", "stock"))]
        return sum(_cpu_of(psutil.Process(self.stack[name].pid)) for name in workers)


def _cpu_of(process: psutil.Process) -> float:
    """CPU seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def bench(server: RedisServer, *, workers: int) -> Iterator[Bench]:
    """Workers, a control worker and a tool host on `server`, and as many workers of a bare Celery app; this process submits."""
    env = {"TURNMILL_MESH_SECRET": ""}
    with Stack(
        "benchmarks.agents", ["benchmarks.tools"], processes=("mesh", "tools", "worker", "control"), redis=server, threads=THREADS, env=env
    ) as stack:
        for _ in range(workers - 1):
            stack.add_replica("worker")
        for number in range(1, workers + 1):
            name = f"stock-{number}"
            command = ("celery", "-A", "benchmarks.stock", "worker", "-P", "threads", "-c", str(THREADS), "-l", "INFO", "-n", name)
            stack.add(name, command, ready=lambda log: " ready." in log)
        os.environ["TURNMILL_REDIS_URL"] = server.url  # the Celery app reads its settings when it is imported
        ports = open_ports(Settings(redis_url=server.url, agents="benchmarks.agents", mesh_connect=(stack.mesh_endpoint,)))
        yield Bench(stack, ports)
        ports.mesh.close()
        ports.store.close()


def run(console: Console, *, turns: int, persistence: Persistence, workers: int) -> None:
    """Measure on one kind of persistence and print a table."""
    table = Table(title=f"Redis append-only file: {persistence}; {workers} worker processes of {THREADS} threads")
    for column in (
        "what",
        "at once",
        "per s",
        "p50 ms",
        "p95 ms",
        "workers' CPU ms",
        "Redis's CPU ms",
        "commands",
        "bytes",
        "of bare chain",
    ):
        table.add_column(column, justify="left" if column == "what" else "right")
    with redis_server(appendonly=persistence) as server, bench(server, workers=workers) as here:
        chain = here.bare(here.app)
        kinds = {
            "bare chain of 3 empty tasks, on the same workers": chain,
            "the same on stock Celery settings": here.bare(stock_app),
            "turn, tool in its own process": here.turn("remote"),
            "turn, worker's own tool": here.turn("own"),
        }
        for send in kinds.values():
            here.measure(send, 30, 4)
        watched = {f"{what}; Flower looks": send for what, send in kinds.items() if send is chain or "turn" in what}
        for at_once in (1, 64):
            count = max(40, turns // 6) if at_once == 1 else turns
            _rows(table, here, kinds, count, at_once)
        here.stack.start_process("flower")  # which switches the workers' events on
        time.sleep(FLOWER_S)
        _rows(table, here, watched, turns, 64)
    console.print(table)


def _rows(table: Table, here: Bench, kinds: Mapping[str, Callable[[], str]], count: int, at_once: int) -> None:
    """Measure each of `kinds`, the better of two times; the first is what the others are compared with."""
    reference = None
    for what, send in kinds.items():
        best = max((here.measure(send, count, at_once) for _ in range(2)), key=lambda figures: figures.per_s)
        reference = reference or best
        figures = (f"{best.per_s:.0f}", f"{best.p50:.1f}", f"{best.p95:.1f}", f"{best.cpu:.2f}", f"{best.redis_cpu:.2f}")
        ratio = f"{best.per_s / reference.per_s:.2f}"
        table.add_row(what, str(at_once), *figures, f"{best.commands:.0f}", f"{best.sent_bytes:.0f}", ratio)


def main() -> None:
    """Measure and print, each kind of persistence in a process of its own: a Celery app belongs to one Redis for life."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=600, help="turns of each kind at 64 at once")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--persistence", nargs="*", default=["off", "everysec", "always"], choices=["off", "everysec", "always"])
    arguments = parser.parse_args()
    if len(arguments.persistence) == 1:
        run(Console(width=160), turns=arguments.turns, persistence=arguments.persistence[0], workers=arguments.workers)
        return
    for persistence in arguments.persistence:
        more = ["--turns", str(arguments.turns), "--workers", str(arguments.workers), "--persistence", persistence]
        subprocess.run([sys.executable, "-m", "benchmarks.turns", *more], check=True)


if __name__ == "__main__":
    main()
