"""The hand that breaks things: it kills, stops and restarts processes of a deployment and its Redis server, as a seed says.

It is their supervisor as well: what ends by itself is started again, and counts as a fault unless it asked for that.
"""

from __future__ import annotations

import heapq
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from orchestration.testing.parts import NotReady, Part
from orchestration.testing.servers import RedisServer
from orchestration.testing.stack import Stack
from tests.chaos.broker import Broker
from tests.chaos.record import Record

#: Processes that may be away or starting at a time; more, and nothing would happen but starts.
MOST_AWAY = 4

#: How long an orderly stop may take before it counts as a fault, in seconds.
STOP_WITHIN_S = 60.0

#: The exit status with which a worker asks its supervisor for a new life.
ASKS_FOR_RESTART = 75

REDIS = "redis"

#: A process may give up while it starts, when Redis dies then; not later.
_NO_REDIS = re.compile(r"StoreUnavailable|Redis is loading|Connection refused|Connection closed by server|Connection reset")


@dataclass(order=True, slots=True)
class _Comeback:
    at: float
    number: int
    what: Callable[[], None] = field(compare=False)


class Hand:
    """Breaks one thing after another in a thread of its own, from `start` to `heal`.

    Args:
        lease_s: how long a silent process keeps its steps; some pauses and outages are longer.
    """

    def __init__(self, seed: int, stack: Stack, redis: RedisServer, record: Record, *, lease_s: float) -> None:
        self._chance = random.Random(f"{seed}/hand")
        self._stack = stack
        self._redis = redis
        self._record = record
        self._lease_s = lease_s
        self._broker = Broker(redis.url, self._chance)
        self._comebacks: list[_Comeback] = []
        self._number = 0
        self._away: set[str] = set()  # killed, paused, stopping: not expected to be there
        self._asked: set[str] = set()  # of these, those that were asked to stop
        self._starting: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hand", daemon=True)
        self.blows = 0
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin."""
        self._record.tell(f"processes: {', '.join(f'{name} {self._stack[name].pid}' for name in self._stack.names())}")
        self._thread.start()

    def heal(self) -> None:
        """Stop breaking, and bring everything back; returns when all processes are ready. Raises what went wrong in the thread."""
        self._stopping.set()
        self._thread.join(120)
        self._broker.close()
        if self.failure is not None:
            raise self.failure
        self._record.tell("heal")
        self._redis.resume() if self._redis_is_up() else self._redis.start()
        for name in self._stack.names():
            part = self._stack[name]
            if part.running:
                part.resume()
            if name in self._asked:
                part.stop()
            part.start()
        for name in self._stack.names():
            self._ready(self._stack[name])
        self._away.clear()
        self._asked.clear()
        self._starting.clear()
        self._record.tell(f"all are ready: {', '.join(f'{name} {self._stack[name].pid}' for name in self._stack.names())}")

    def _ready(self, part: Part) -> None:
        try:
            part.wait_ready()
        except NotReady:
            if part.running:
                raise
            self._exited(part)
            part.start().wait_ready()

    def _run(self) -> None:
        next_blow = time.monotonic() + 0.5
        try:
            while not self._stopping.wait(0.05):
                while self._comebacks and self._comebacks[0].at <= time.monotonic():
                    heapq.heappop(self._comebacks).what()
                self._supervise()
                if time.monotonic() >= next_blow and len(self._away) + len(self._starting) < MOST_AWAY:
                    self._blow()
                    next_blow = time.monotonic() + min(4.0, self._chance.expovariate(1 / 1.2))
        except BaseException as error:
            self.failure = error
            self._record.tell(f"the hand failed: {error!r}")

    def _supervise(self) -> None:
        for name in self._stack.names():
            part = self._stack[name]
            if name in self._away:
                continue
            if not part.running:
                self._exited(part)
                self._starting.add(name)
                part.start()
            elif name in self._starting and self._is_ready(part):
                self._starting.discard(name)

    def _exited(self, part: Part) -> None:
        status = part.status
        self._record.tell(f"{part.name} ended by itself with status {status}")
        without_redis = part.name in self._starting and _NO_REDIS.search(part.log())
        if status != ASKS_FOR_RESTART and not without_redis:
            self._record.fault(f"{part.name} ended by itself with status {status}\n{part.tail(25)}")

    def _is_ready(self, part: Part) -> bool:
        try:
            part.wait_ready(timeout_s=0)
        except NotReady:
            return False
        return True

    def _redis_is_up(self) -> bool:
        try:
            return self._redis.pid > 0
        except RuntimeError:
            return False

    def _later(self, after_s: float, what: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._comebacks, _Comeback(time.monotonic() + after_s, self._number, what))

    def _blow(self) -> None:
        self.blows += 1
        kind = self._chance.choices(
            ("kill", "pause", "long pause", "stop", "kill all", "redis", "redis pause", "broker"),
            (0.4, 0.12, 0.1, 0.1, 0.06, 0.08, 0.05, 0.09),
        )[0]
        if kind == "broker":
            if REDIS not in self._away:
                self._record.tell(self._broker.mischief())
            return
        if kind.startswith("redis"):
            if REDIS not in self._away:
                self._break_redis(paused=kind == "redis pause")
            return
        free = [name for name in self._stack.names() if name not in self._away and name not in self._starting]
        if not free:
            return
        # as often as not a worker: most of the promises are about them
        favoured = [name for name in free if name.startswith(("worker", "control"))]
        name = self._chance.choice(favoured if favoured and self._chance.random() < 0.5 else free)
        if kind == "kill all":
            kind_of = name.partition("-")[0]
            for one in [one for one in free if one.partition("-")[0] == kind_of]:
                self._kill(one)
        elif kind == "kill":
            self._kill(name)
        elif kind == "stop":
            self._stop(name)
        else:
            longest = 1.6 * self._lease_s
            self._pause(name, self._chance.uniform(self._lease_s, longest) if kind == "long pause" else self._chance.uniform(0.1, 1.5))

    def _kill(self, name: str) -> None:
        back_s = self._chance.choice((0.0, self._chance.uniform(0, 2)))
        self._record.tell(f"kill -9 {name}, back after {back_s:.2f} s")
        self._stack[name].kill()
        self._away.add(name)
        self._later(back_s, lambda: self._bring_back(name))

    def _stop(self, name: str) -> None:
        self._record.tell(f"SIGTERM {name}")
        self._stack[name].terminate()
        self._away.add(name)
        self._asked.add(name)
        began = time.monotonic()

        def look() -> None:
            part = self._stack[name]
            if part.running and time.monotonic() - began < STOP_WITHIN_S:
                self._later(0.1, look)
                return
            if part.running:
                self._record.fault(f"{name} had not stopped {STOP_WITHIN_S:g} s after SIGTERM\n{part.tail()}")
                part.kill()
            elif part.status not in (0, -15):
                self._record.fault(f"{name} was stopped in an orderly way and ended with status {part.status}\n{part.tail(25)}")
            self._asked.discard(name)
            self._record.tell(f"{name} stopped after {time.monotonic() - began:.1f} s")
            self._bring_back(name)

        self._later(0.1, look)

    def _pause(self, name: str, for_s: float) -> None:
        self._record.tell(f"SIGSTOP {name} for {for_s:.2f} s")
        self._stack[name].pause()
        self._away.add(name)

        def resume() -> None:
            self._record.tell(f"SIGCONT {name}")
            self._stack[name].resume()
            self._away.discard(name)

        self._later(for_s, resume)

    def _bring_back(self, name: str) -> None:
        part = self._stack[name].start()
        self._record.tell(f"started {name}, process {part.pid}")
        self._away.discard(name)
        self._starting.add(name)

    def _break_redis(self, *, paused: bool) -> None:
        self._away.add(REDIS)
        if paused:
            for_s = self._chance.uniform(0.1, 3)
            self._record.tell(f"SIGSTOP redis for {for_s:.2f} s")
            self._redis.pause()
            self._later(for_s, self._resume_redis)
            return
        away_s = self._chance.choice((0.0, self._chance.uniform(0, 2), 1.3 * self._lease_s))
        orderly = self._chance.random() < 0.3
        self._record.tell(f"{'shut down' if orderly else 'kill -9'} redis, back after {away_s:.2f} s")
        if orderly:
            self._redis.shut_down()
        else:
            self._redis.kill()
        self._later(away_s, self._start_redis)

    def _resume_redis(self) -> None:
        self._record.tell("SIGCONT redis")
        self._redis.resume()
        self._away.discard(REDIS)

    def _start_redis(self) -> None:
        self._redis.start()
        self._record.tell("redis is back")
        self._away.discard(REDIS)


#: What a log says of a fault of Turnmill's own: a task, a step or a sweep that ended with an exception nobody foresaw.
_ALARMS = re.compile(
    r"raised unexpected|unexpected \w+ at |sweep failed|lease not renewed$|could not look|a due \w+ failed|ERROR: .*Exception in ASGI"
)


def alarms(directory: Path) -> list[str]:
    """The lines of all logs that tell of a fault which some retry hid."""
    return [
        f"{path.name}: {line}"
        for path in sorted(directory.glob("*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if _ALARMS.search(line) and "StoreUnavailable" not in line
    ]


def log_tails(directory: Path, *, lines: int) -> str:
    """The ends of all logs of a deployment, over restarts."""
    tails = []
    for path in sorted(directory.glob("*.log")):
        text = "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
        tails.append(f"--- {path.name}\n{text}")
    return "\n".join(tails)
