"""The gateway alone: submissions, frames, the time from a frame's commit to a watcher's socket, and the memory of a watcher.

Beside the time stands that of bare Redis pub/sub in the same run, from the same clock to a plain subscriber. A frame's number is the
store's time in microseconds when it was committed, so a watcher can tell the time by itself. Nothing runs the turns here.

    python -m benchmarks.gateway [--seconds 5] [--idle 2000] [--busy 200]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import redis.asyncio
from rich.console import Console
from rich.table import Table

from orchestration.core.frames import FrameKind, frame
from orchestration.testing.parts import Part, answers_http
from orchestration.testing.servers import RedisServer, free_port, redis_server

ROOT = Path(__file__).resolve().parent.parent

#: Bytes of text in a token frame.
TOKEN_BYTES = 20

#: Frames a second of the busy conversation while times are taken: a fast model.
CALM_PER_S = 50

#: Stores and publishes one frame as the journal does, and the same as bare pub/sub on a channel beside it.
_EMIT = """
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local seq = math.max(tonumber(redis.call('HGET', KEYS[1], 'seq') or '0') + 1, now)
local id = string.format('%.0f', seq)
redis.call('XADD', KEYS[1] .. ':frames', 'MAXLEN', '~', 10000, id .. '-0', 't', ARGV[1], 'f', ARGV[2])
redis.call('PUBLISH', KEYS[1] .. ':live', id .. ' ' .. ARGV[1] .. ' ' .. ARGV[2])
redis.call('HSET', KEYS[1], 'seq', id)
redis.call('PUBLISH', 'bench:bare', id .. ' ' .. ARGV[1] .. ' ' .. ARGV[2])
return id
"""


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each measurement")
    parser.add_argument("--clients", type=int, default=16, help="submitters at once")
    parser.add_argument("--idle", type=int, default=2000, help="idle watchers, each of a conversation of its own")
    parser.add_argument("--busy", type=int, default=200, help="watchers of one busy conversation")
    parser.add_argument("--channels", type=int, default=500, help="idle channels")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with redis_server() as server:
        asyncio.run(_measure(server, options, Console(width=140)))


async def _measure(server: RedisServer, options: argparse.Namespace, console: Console) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="turnmill-bench-") as directory:
        gateway = _gateway(server, port, Path(directory))
        try:
            gateway.start().wait_ready()
            bench = Bench(server.url, port, psutil.Process(gateway.pid))
            async with bench:
                console.print(await _submissions(bench, options))
                console.print(await _times(bench, options))
                console.print(await _memory(bench, options))
        finally:
            gateway.stop()


def _gateway(server: RedisServer, port: int, directory: Path) -> Part:
    env = {**os.environ, "TURNMILL_REDIS_URL": server.url, "TURNMILL_AGENTS": "benchmarks.agents", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "uvicorn", "gateway.app:app", "--port", str(port), "--log-level", "warning"]
    url = f"http://127.0.0.1:{port}/healthz"
    return Part("gateway", command, env=env, cwd=ROOT, log=directory / "gateway.log", ready=lambda _: answers_http(url))


class Bench:
    """The gateway under load, and a hand that writes frames into its Redis."""

    def __init__(self, redis_url: str, port: int, process: psutil.Process) -> None:
        self.port = port
        self.process = process
        self.redis = redis.asyncio.Redis.from_url(redis_url, decode_responses=True)
        self._emit = self.redis.register_script(_EMIT)
        self._reading: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Bench:
        await self.redis.ping()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.redis.aclose()

    async def begin(self, name: str) -> None:
        """A conversation that can be watched."""
        await self.redis.hset(f"tm:dev:conv:cv_{name}", "agent", "own")

    async def write(self, name: str, body: str) -> None:
        """One frame of a conversation."""
        await self._emit(keys=[f"tm:dev:conv:cv_{name}"], args=["tn_bench", body])

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the gateway."""
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)

    async def post(self, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], path: str, body: bytes) -> int:
        """Send a request on a kept connection; returns the status of its answer."""
        reader, writer = connection
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        length = next((int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length")), 0)
        await reader.readexactly(length)
        return int(lines[0].split()[1])

    async def watch(self, name: str, heard: Callable[[int], None]) -> asyncio.StreamWriter:
        """Watch a conversation; `heard` gets the number of each frame. Returns once the stream has begun."""
        reader, writer = await self.connect()
        writer.write(f"GET /v1/conversations/cv_{name}/frames HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head

        async def read() -> None:
            rest = b""
            while chunk := await reader.read(65_536):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(b"id: "):
                        heard(int(line[4:]))

        task = asyncio.create_task(read())
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        return writer

    async def channel(self) -> asyncio.StreamWriter:
        """Open a channel that says nothing; returns once it is open."""
        reader, writer = await self.connect()
        writer.write(
            b"GET /v1/agents/own/channel HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Extensions: permessage-deflate\r\n\r\n"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101"), head
        await reader.read(65_536)  # the frame that names its conversation
        return writer


async def _submissions(bench: Bench, options: argparse.Namespace) -> Table:
    table = Table("submissions", "per second", "p50 ms", "p95 ms", box=None)
    body = json.dumps({"input": "go"}).encode()
    for clients in (1, options.clients):
        times: list[float] = []
        end = time.perf_counter() + options.seconds

        async def submit(times: list[float] = times, end: float = end) -> None:
            connection = await bench.connect()
            while (began := time.perf_counter()) < end:
                if await bench.post(connection, "/v1/agents/own/turns", body) != 202:
                    raise SystemExit("a submission was refused")
                times.append(time.perf_counter() - began)
            connection[1].close()

        await asyncio.gather(*(submit() for _ in range(clients)))
        table.add_row(f"{clients} at once", f"{len(times) / options.seconds:.0f}", *_percentiles(times))
    return table


async def _times(bench: Bench, options: argparse.Namespace) -> Table:
    table = Table("frames", "written/s", "delivered/s", "p50 ms", "p95 ms", "bare pub/sub p50", "p95", "p50 ratio", box=None)
    body = frame(FrameKind.TOKEN, "tn_bench", 1, text="x" * TOKEN_BYTES)
    for watchers, per_s in ((1, CALM_PER_S), (options.busy, CALM_PER_S), (1, 0), (options.busy, 0)):
        name = f"busy_{watchers}_{per_s}"
        await bench.begin(name)
        times: list[float] = []
        bare: list[float] = []

        def heard(seq: int, times: list[float] = times) -> None:
            times.append(time.time() - seq / 1e6)

        async with AsyncExitStack() as stack:
            await _bare(bench, bare, stack)
            for _ in range(watchers):
                stack.callback((await bench.watch(name, heard)).close)
            written = await _write(bench, name, body, options.seconds, per_s, lambda heard_so_far=times: len(heard_so_far), watchers)
            began = time.perf_counter()
            while len(times) < written * watchers and time.perf_counter() - began < 60:
                await asyncio.sleep(0.05)
            took = options.seconds + time.perf_counter() - began
        label = f"{watchers} watcher(s), " + (f"{per_s}/s" if per_s else "as fast as they go")
        ratio = sorted(times)[len(times) // 2] / sorted(bare)[len(bare) // 2]
        shown = (*_percentiles(times), *_percentiles(bare), f"{ratio:.1f}") if per_s else ("–",) * 5
        table.add_row(label, f"{written / options.seconds:.0f}", f"{len(times) / took:.0f}", *shown)
    return table


async def _bare(bench: Bench, times: list[float], stack: AsyncExitStack) -> None:
    """A plain subscriber beside the gateway."""
    pubsub = bench.redis.pubsub()
    await pubsub.subscribe("bench:bare")

    async def listen() -> None:
        async for message in pubsub.listen():
            if message["type"] == "message":
                times.append(time.time() - int(message["data"].partition(" ")[0]) / 1e6)

    task = asyncio.create_task(listen())

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await pubsub.aclose()

    stack.push_async_callback(end)


async def _write(bench: Bench, name: str, body: str, seconds: float, per_s: int, arrived: Callable[[], int], watchers: int) -> int:
    """Write frames for some seconds; without a pace as fast as watchers take them, a few hundred ahead."""
    written, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        await bench.write(name, body)
        written += 1
        if per_s:
            await asyncio.sleep(1 / per_s)
        while not per_s and written - arrived() / watchers > 300:
            await asyncio.sleep(0.002)
    return written


async def _memory(bench: Bench, options: argparse.Namespace) -> Table:
    table = Table("memory of the gateway", "MB", "kB each", "CPU % of one core", box=None)
    before = bench.process.memory_info().rss
    table.add_row("before", f"{before / 1e6:.0f}", "", "")
    async with AsyncExitStack() as stack:
        for start in range(0, options.idle, 50):
            names = [f"idle_{number}" for number in range(start, min(start + 50, options.idle))]
            await asyncio.gather(*(bench.begin(name) for name in names))
            for writer in await asyncio.gather(*(bench.watch(name, lambda _: None) for name in names)):
                stack.callback(writer.close)
        with_idle = bench.process.memory_info().rss
        bench.process.cpu_percent()
        await asyncio.sleep(max(options.seconds, 15.0))  # comments go out, and all are looked at once
        busy_cpu = bench.process.cpu_percent()
        settled = bench.process.memory_info().rss
        each = (max(with_idle, settled) - before) / max(1, options.idle) / 1e3
        table.add_row(f"{options.idle} idle watchers", f"{settled / 1e6:.0f}", f"{each:.0f}", f"{busy_cpu:.0f}")
        await bench.begin("crowd")
        for _ in range(options.busy):
            stack.callback((await bench.watch("crowd", lambda _: None)).close)
        body = frame(FrameKind.TOKEN, "tn_bench", 1, text="x" * TOKEN_BYTES)
        bench.process.cpu_percent()
        await _write(bench, "crowd", body, options.seconds, CALM_PER_S, lambda: 0, options.busy)
        crowd_cpu = bench.process.cpu_percent()
        with_crowd = bench.process.memory_info().rss
        each = (with_crowd - settled) / max(1, options.busy) / 1e3
        table.add_row(f"and {options.busy} on a busy conversation", f"{with_crowd / 1e6:.0f}", f"{each:.0f}", f"{crowd_cpu:.0f}")
        for start in range(0, options.channels, 50):
            for writer in await asyncio.gather(*(bench.channel() for _ in range(start, min(start + 50, options.channels)))):
                stack.callback(writer.close)
        with_channels = bench.process.memory_info().rss
        each = (with_channels - with_crowd) / max(1, options.channels) / 1e3
        table.add_row(f"and {options.channels} idle channels", f"{with_channels / 1e6:.0f}", f"{each:.0f}", "")
    return table


def _percentiles(seconds: list[float]) -> tuple[str, str]:
    ordered = sorted(seconds) or [float("nan")]
    return tuple(f"{ordered[int(len(ordered) * share)] * 1000:.2f}" for share in (0.5, 0.95))  # type: ignore[return-value]


if __name__ == "__main__":
    main()
