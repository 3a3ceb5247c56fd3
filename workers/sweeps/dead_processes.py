"""Processes that died with steps in hand. A dropped liveliness token is a suspicion, silence after a question is the
proof; without tokens the lease's end is."""

from __future__ import annotations

import logging
import queue
import threading
import time

from orchestration.actions.take_back import take_back
from orchestration.core.errors import StoreUnavailable
from orchestration.wiring import Ports

log = logging.getLogger("turnmill.sweeps")

#: How long a suspected process has to renew its lease, in seconds.
ANSWER_WITHIN_S = 0.3

#: For how long after a death steps that nobody claims are looked for more eagerly, in seconds: the dead process may have
#: taken their messages out of the queue without having claimed them. At this age, in milliseconds, they count as lost then.
MOURNING_S, EAGER_LOST_AFTER_MS = 4.0, 600


class DeadProcesses:
    """Finds dead processes and passes their steps on."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._last_death = -MOURNING_S
        self._suspects: queue.Queue[str | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="turnmill-suspects", daemon=True)

    def watch(self) -> None:
        """Begin to follow the liveliness tokens of worker processes."""
        self._thread.start()
        self._ports.mesh.watch_processes(self._suspects.put)

    def stop(self) -> None:
        """Stop following."""
        self._suspects.put(None)

    def _run(self) -> None:
        while (process := self._suspects.get()) is not None:
            suspects = {process}
            while not self._suspects.empty():
                more = self._suspects.get_nowait()
                if more is None:
                    return
                suspects.add(more)
            try:
                self.question(suspects)
            except StoreUnavailable as error:
                log.warning("suspects not questioned: %s; their leases decide", error)
            except Exception:
                log.exception("suspects not questioned; their leases decide")

    def lost_after_ms(self) -> int | None:
        """The age from which unclaimed steps count as lost just now; None for the usual one."""
        return EAGER_LOST_AFTER_MS if time.monotonic() - self._last_death < MOURNING_S else None

    def question(self, processes: set[str]) -> None:
        """Ask suspected processes whether they live; those that stay silent lose their steps."""
        book = self._ports.leases
        ends = {process: end for process in processes if (end := book.end_of(process)) is not None}
        for process in ends:
            book.ask(process)
        limit = time.monotonic() + ANSWER_WITHIN_S
        silent = dict(ends)
        while silent and time.monotonic() < limit:
            time.sleep(0.02)
            silent = {process: end for process, end in silent.items() if book.end_of(process) == end}
        for process, end in silent.items():
            self.depose(process, end)

    def depose(self, process: str, seen_end: str) -> None:
        """Take the lease of a silent process and pass its steps on."""
        if self._ports.leases.depose(process, seen_end):
            self._last_death = time.monotonic()
            log.warning("process %s is silent; its steps are passed on", process)
            self.pass_on_steps(process)

    def pass_on_steps(self, process: str) -> None:
        """Run the steps of a deposed process again, or record that nobody knows what came of them."""
        ports = self._ports
        for step in ports.leases.steps_of(process):
            take_back(ports, step, process)
        ports.leases.forget(process)
