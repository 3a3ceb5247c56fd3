"""Notices a worker that lives but takes nothing, as Celery's has done after a lost connection (celery #8030, #8091),
and ends it for its supervisor to restart.

The sign: steps of a queue that this process consumes have been waiting for a while, it has free slots, and it has taken
nothing for as long. A busy worker, an empty queue and a queue that an operator switched off are no sign.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from celery import signals
from celery.worker import state

from orchestration.core.errors import StoreUnavailable
from orchestration.core.ids import StepKind
from orchestration.wiring import Ports
from workers.draining import hand_on_and_exit

log = logging.getLogger("turnmill.worker")

#: Pause between two looks, in seconds.
LOOK_EVERY_S = 1.0


class Watchdog:
    """Watches the consumer of this process.

    Args:
        consumer: the worker's consumer controller, as `worker_ready` sends it.
        leave: what ends the process; tests give their own.
    """

    def __init__(self, ports: Ports, consumer: Any, leave: Callable[[Ports, int], None] = hand_on_and_exit) -> None:
        self._ports = ports
        self._consumer = consumer
        self._leave = leave
        self._stopping = threading.Event()
        self._last_taken = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="turnmill-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        signals.task_received.connect(self._taken, dispatch_uid="turnmill-watchdog", weak=False)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopping.set()

    def _taken(self, **_: Any) -> None:
        self._last_taken = time.monotonic()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            try:
                if self.deaf():
                    log.critical("this worker lives but takes nothing although steps wait; it ends, to be started again")
                    self._leave(self._ports, os.EX_TEMPFAIL)
                    return
            except StoreUnavailable:
                self._last_taken = time.monotonic()  # nobody takes anything while the broker is away
            except Exception:
                log.exception("the watchdog could not look")

    def deaf(self) -> bool:
        """Whether steps have been waiting for `settings.deaf_after_s` although this process could take them."""
        if time.monotonic() - self._last_taken < self._ports.settings.deaf_after_s:
            return False
        if len(state.reserved_requests) >= self._consumer.pool.num_processes:
            self._last_taken = time.monotonic()
            return False
        queues = {self._ports.queue.queue_name(kind): kind for kind in (StepKind.PLAN, StepKind.TOOL, StepKind.DECIDE)}
        consumer = self._consumer.task_consumer
        consumed = [kind for name, kind in queues.items() if consumer is not None and consumer.consuming_from(name)]
        if all(self._ports.queue.is_empty(kind) for kind in consumed):
            self._last_taken = time.monotonic()
            return False
        return True
