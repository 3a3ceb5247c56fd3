"""Leases: one for each process, renewed in one round trip for all its running steps.

A process that does not renew in time is deposed: its running steps are passed on, and whatever it still commits is refused.
`deadline` is the local, monotonic end of the lease, counted from before the renewal was sent.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from orchestration.core.ids import StepId
from orchestration.state.outbox import Outbox
from orchestration.state.store import Store, texts, translated

#: Claims without an answer that are remembered; of older ones a tool's outcome counts as unknown.
MOST_UNANSWERED = 1000


def new_process_name() -> str:
    """A name for one life of one process: host, process id and a random part."""
    host = "".join(c if c.isalnum() or c == "-" else "-" for c in socket.gethostname())[:40]
    return f"{host}.{os.getpid()}.{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A step that this process has claimed and that none of its threads works on any more. `unbegun`: nobody ever has."""

    step: StepId
    owner: str
    attempt: int
    unbegun: bool


class ProcessLease:
    """This process's lease. `register` once, `renew` about every third of `lease_s`; safe for threads.

    It knows which of its claims are under way, so that those that nobody works on any more are found: `given_up`.
    """

    def __init__(self, store: Store, outbox: Outbox) -> None:
        self._store = store
        self._outbox = outbox
        self._lease_ms = int(store.settings.lease_s * 1000)
        self._next_claim = 1
        self._under_way: set[int] = set()
        self._unanswered: deque[str] = deque(maxlen=MOST_UNANSWERED)
        self._thread = threading.local()
        self._lock = threading.Lock()
        self.process = ""
        self.deadline = 0.0
        self.look = threading.Event()  #: set when a thread has left its work in a way that may have left a claim behind

    def register(self, instead_of: str = "") -> None:
        """Take a lease under a new name; steps claimed under an older one are given up.

        Does nothing when another thread has taken one in place of `instead_of` already.
        """
        with self._lock:
            if self.process != instead_of:
                return
            process = new_process_name()
            sent = time.monotonic()
            self._store.run("renew", process, self._lease_ms, "register", self._outbox.take_confirmations())
            self.process, self.deadline = process, sent + self._lease_ms / 1000

    def renew(self) -> bool:
        """Renew it; False when it was taken away, and `register` is to be called."""
        sent = time.monotonic()
        ends = self._store.run("renew", self.process, self._lease_ms, "renew", self._outbox.take_confirmations())
        if not ends:
            return False
        self.deadline = sent + self._lease_ms / 1000
        return True

    def give_back(self) -> None:
        """End the lease of a process that stops; steps that it still runs are passed on at once."""
        with translated():
            ends = self._store.client.zscore("tm:leases", self.process)
        if ends is not None:
            self._store.run("depose", self.process, f"{ends:.0f}")

    def next_owner(self) -> str:
        """What the next claim is signed with: the process and a number."""
        with self._lock:
            number, self._next_claim = self._next_claim, self._next_claim + 1
            self._under_way.add(number)
        begun: list[int] | None = getattr(self._thread, "begun", None)
        if begun is not None:
            begun.append(number)
        return f"{self.process}#{number}"

    @contextmanager
    def working(self) -> Iterator[None]:
        """What this thread claims within the block is under way until its end, however that comes."""
        outer, begun = getattr(self._thread, "begun", None), list[int]()
        self._thread.begun = begun
        try:
            yield
        except BaseException:
            self.look.set()
            raise
        finally:
            self._thread.begun = outer
            with self._lock:
                self._under_way.difference_update(begun)

    def unanswered(self, owner: str) -> None:
        """Note that a claim was given up without an answer; should it stand all the same, nothing was done under it."""
        self._unanswered.append(owner)

    def given_up(self) -> list[GivenUp]:
        """The steps that this process holds although none of its threads works on them any more."""
        with self._lock:
            under_way, following = sorted(self._under_way), self._next_claim
        found = texts(self._store.run("abandoned", self.process, json.dumps(under_way), following))
        return [
            GivenUp(StepId.parse(found[i]), found[i + 1], int(found[i + 2]), found[i + 1] in self._unanswered)
            for i in range(0, len(found), 3)
        ]

    def wait_for_question(self, timeout_s: float) -> bool:
        """Sleep until somebody asks whether this process lives, at most `timeout_s` seconds; True when asked."""
        with translated():
            return self._store.client.blpop([f"tm:ask:{self.process}"], timeout=timeout_s) is not None


class LeaseBook:
    """Everybody's leases, as the recovering side sees them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def lead(self, duty: str, process: str, hold_ms: int) -> bool:
        """Whether `process` leads `duty` for the next `hold_ms`; the first one that asks does, until it stops asking or loses its lease.

        A part of a process that leads for itself is named `process#part`."""
        return bool(self._store.run("leader", duty, process, hold_ms))

    def leads(self, duty: str, process: str) -> bool:
        """Whether `process` leads `duty` at this moment."""
        with translated():
            return self._store.client.get(f"tm:leader:{duty}") == process

    def step_down(self, duty: str, process: str) -> None:
        """Give a leadership back, so that another takes it at once."""
        if self.lead(duty, process, 1000):
            with translated():
                self._store.client.delete(f"tm:leader:{duty}")

    def end_of(self, process: str) -> str | None:
        """When its lease ends, as Redis writes it; None when it has none."""
        with translated():
            ends = self._store.client.zscore("tm:leases", process)
        return None if ends is None else f"{ends:.0f}"

    def ask(self, process: str) -> None:
        """Ask a process whether it lives; it answers by renewing its lease."""
        with translated():
            pipe = self._store.client.pipeline(transaction=False)
            pipe.lpush(f"tm:ask:{process}", "1")
            pipe.expire(f"tm:ask:{process}", 60)
            pipe.execute()

    def depose(self, process: str, seen_end: str) -> bool:
        """Take its lease away, unless it was renewed since `seen_end` was read."""
        return bool(self._store.run("depose", process, seen_end))

    def steps_of(self, process: str) -> list[StepId]:
        """The steps that it has claimed."""
        with translated():
            members = self._store.client.smembers(f"tm:run:{process}")
        return [StepId.parse(text) for text in sorted(texts(list(members)))]

    def forget(self, process: str) -> None:
        """Drop a deposed process that has no steps left."""
        with translated():
            self._store.client.srem("tm:deposed", process)

    def reclaim(
        self, step: StepId, whose: str, *, result: str | None, frames: str = "[]", pause_ms: int = 0, unbegun: bool = False
    ) -> list[StepId]:
        """Pass on one step: run it again after a pause, or, with `result`, record that. What is returned must be sent.

        Args:
            whose: a deposed process, or the owner of a claim that a living one has given up.
            unbegun: nothing was done under that claim, and it is not counted.
        """
        mode = "unknown" if result is not None else "unbegun" if unbegun else "again"
        answer = self._store.run("reclaim", str(step), whose, mode, result or "", frames, pause_ms)
        return [StepId.parse(text) for text in answer]
