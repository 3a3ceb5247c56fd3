"""What the gateway's tests stand on: a served gateway over a real Redis, and a hand that writes frames as the journal does."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import redis
import uvicorn

from gateway.app import create_app
from gateway.parts import Pace
from orchestration.core.frames import FrameKind, frame
from orchestration.core.ids import StepId, StepKind
from orchestration.core.outbound import Delivery
from orchestration.core.tool import Discover, Outcome, ToolAnswer, ToolQuery, ToolSpec
from orchestration.outbound.deliver import deliver
from orchestration.project import Project
from orchestration.settings import Settings
from orchestration.state.store import Store
from orchestration.steps.decide import decide as decide_step
from orchestration.steps.observe import observe
from orchestration.steps.plan import plan
from orchestration.steps.tool import tool as tool_step
from orchestration.testing.servers import RedisServer
from orchestration.wiring import Ports, make_ports
from workers.leases import LeaseKeeper
from workers.sweeps.loop import Sweeps

#: Numbers, stores and publishes one frame at once, as the scripts do.
_EMIT = """
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local seq = math.max(tonumber(redis.call('HGET', KEYS[1], 'seq') or '0') + 1, now)
local id = string.format('%.0f', seq)
redis.call('XADD', KEYS[1] .. ':frames', id .. '-0', 't', ARGV[1], 'f', ARGV[2])
if ARGV[3] == '1' then redis.call('PUBLISH', KEYS[1] .. ':live', id .. ' ' .. ARGV[1] .. ' ' .. ARGV[2]) end
redis.call('HSET', KEYS[1], 'seq', id)
redis.call('HSETNX', KEYS[2], 'seq0', id)
redis.call('HSET', KEYS[2], 'seqn', id)
return id
"""


class SilentQueue:
    """A queue that only remembers what it was given."""

    def __init__(self) -> None:
        self.sent: list[StepId] = []

    def send(self, steps: Sequence[StepId], **_: Any) -> None:
        self.sent.extend(steps)

    def ring(self, steps: Sequence[StepId]) -> dict[str, tuple[str, str]]:
        return {}

    def send_outbound(self, tenant: str, delivery: Delivery, attempt: int) -> None:
        pass

    def queue_name(self, kind: StepKind) -> str:
        return str(kind)

    def is_empty(self, kind: StepKind) -> bool:
        return True


class EmptyMesh:
    """A mesh that nobody is on."""

    def ask(self, query: ToolQuery) -> ToolAnswer:
        return ToolAnswer(Outcome.NOT_RUN, code="not_found", message=f"nobody serves {query.prefix}")

    def discover(self, wishes: Sequence[Discover], *, sure: bool = False) -> list[ToolSpec]:
        return []

    def serve(self, tools: Sequence[Any]) -> object:
        return None

    def close(self) -> None:
        pass

    def announce_process(self, process: str) -> None:
        pass

    def watch_processes(self, on_drop: Callable[[str], object]) -> None:
        pass


class Hand:
    """Writes frames of one tenant into Redis."""

    def __init__(self, url: str, tenant: str = "dev") -> None:
        self.redis = redis.Redis.from_url(url, decode_responses=True)
        self.tenant = tenant
        self._emit = self.redis.register_script(_EMIT)

    def key(self, conversation_id: str) -> str:
        return f"tm:{self.tenant}:conv:{conversation_id}"

    def write(self, conversation_id: str, turn_id: str, text: str, *, publish: bool = True) -> int:
        """One token frame; returns its number."""
        return self.put(conversation_id, turn_id, frame(FrameKind.TOKEN, turn_id, 1, text=text), publish=publish)

    def put(self, conversation_id: str, turn_id: str, body: str, *, publish: bool = True) -> int:
        keys = [self.key(conversation_id), f"tm:{self.tenant}:turn:{turn_id}"]
        return int(self._emit(keys=keys, args=[turn_id, body, int(publish)]))

    def close(self) -> None:
        self.redis.close()


class Worker(SilentQueue):
    """A queue whose steps are run at once, by threads of this process over the same Redis: turns that end, without worker processes."""

    def __init__(self, threads: int = 4) -> None:
        super().__init__()
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        self._stopping = threading.Event()

    def begin(self, ports: Ports) -> None:
        """Work on what is sent, over these ports, until `end`."""
        self._ports = ports
        self._keeper, self._sweeps = LeaseKeeper(ports), Sweeps(ports)
        self._keeper.start()
        until(lambda: ports.lease.process, "a lease")
        self._sweeps.start()
        self._closer = threading.Thread(target=self._close_chords, daemon=True)
        for thread in (*self._threads, self._closer):
            thread.start()

    def end(self) -> None:
        self._stopping.set()
        for _ in self._threads:
            self._waiting.put(None)
        for thread in (*self._threads, self._closer):
            thread.join(20)
        self._sweeps.stop()
        self._keeper.stop()

    def send(self, steps: Sequence[StepId], **_: Any) -> None:
        super().send(steps)
        for step in steps:
            self._waiting.put(functools.partial(self._run, step))

    def send_outbound(self, tenant: str, delivery: Delivery, attempt: int) -> None:
        self._waiting.put(lambda: deliver(self._ports, tenant, delivery.name, attempt))

    def _work(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()

    def _run(self, step: StepId) -> None:
        do = {StepKind.PLAN: plan, StepKind.TOOL: tool_step, StepKind.OBSERVE: observe, StepKind.DECIDE: decide_step}[step.kind]
        do(step, self._ports)

    def _close_chords(self) -> None:
        # What Celery does when the last header of a chord has ended.
        while not self._stopping.wait(0.02):
            for name in self._ports.store.client.zrange("tm:sent:plan", 0, -1):
                step = StepId.parse(str(name))
                if step.kind is StepKind.OBSERVE:
                    self._run(step)


@dataclass
class Served:
    """A gateway that is being served, with a client for it."""

    url: str
    client: httpx.Client
    ports: Ports
    app: Any
    hand: Hand
    events: list[Any] = field(default_factory=list)

    @property
    def watching(self) -> int:
        return int(self.app.state.parts.hub.watching)


@contextlib.contextmanager
def served_gateway(
    redis_url: str, project: Project, *, pace: Pace | None = None, working: bool = False, mesh: Any = None, **settings: Any
) -> Iterator[Served]:
    """A gateway on a free port of loopback, served by uvicorn in a thread until the block ends.

    Args:
        working: turns are worked through, by threads beside it; else nothing runs them.
    """
    made = Settings(redis_url=redis_url, **settings)
    store = Store(made)
    worker = Worker() if working else None
    ports = make_ports(made, project, store, worker or SilentQueue(), mesh or EmptyMesh())
    if worker is not None:
        worker.begin(ports)
    app = create_app(made, ports=lambda _: ports, pace=pace)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive(), "the gateway to start")
    assert server.started, "the gateway did not start"
    port = server.servers[0].sockets[0].getsockname()[1]
    hand = Hand(redis_url)
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=30) as client:
            yield Served(url, client, ports, app, hand)
    finally:
        app.state.parts.hub.stop()
        server.should_exit = True
        thread.join(20)
        if worker is not None:
            worker.end()
        hand.close()


def emptied(server: RedisServer) -> str:
    """The address of a test server, of which nothing is left from earlier tests; call it before anything uses it."""
    with redis.Redis.from_url(server.url) as client:
        client.flushdb()
    return server.url


def until(condition: Callable[[], object], what: str, *, patience_s: float = 30) -> None:
    """Wait for a condition; the patience only bounds a broken run."""
    end = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited in vain for {what}")
        time.sleep(0.01)
