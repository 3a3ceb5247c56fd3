"""The sweeping thread: holds the leadership if nobody else does, looks once a tick, and hands each kind of finding to its duty."""

from __future__ import annotations

import logging
import threading
import time

from orchestration.core.errors import StoreUnavailable
from orchestration.wiring import Ports
from workers.sweeps.dead_processes import DeadProcesses
from workers.sweeps.due import handle_due
from workers.sweeps.lost_steps import send_lost
from workers.sweeps.unsent import send_unsent

log = logging.getLogger("turnmill.sweeps")

#: Pause between two looks, in seconds.
TICK_S = 0.2

#: How many findings of each kind one look brings.
MOST = 200

#: How long a leader that dies keeps others waiting, in milliseconds.
LEADER_MS = 1500


class Sweeps:
    """Recovery's thread in this process."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turnmill-sweeps", daemon=True)
        self._reachable_since: float | None = None
        self.dead = DeadProcesses(ports)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()
        self.dead.watch()

    def stop(self) -> None:
        """Stop looking; another process takes the leadership at once."""
        self._stopping.set()
        self.dead.stop()
        self._thread.join(timeout=5)
        try:
            self._ports.leases.step_down("sweeps", self._ports.lease.process)
        except StoreUnavailable:
            log.warning("the leadership could not be given back; it ends by itself")

    def _run(self) -> None:
        more = False
        while not self._stopping.wait(0 if more else TICK_S):
            more = False
            try:
                more = self.look()
            except StoreUnavailable as error:
                # leases could not be renewed in this time either: nobody is taken for dead until a full lease has passed
                self._reachable_since = None
                log.warning("sweep: %s", error)
            except Exception:
                log.exception("sweep failed; the next one comes in %.1f s", TICK_S)

    def look(self) -> bool:
        """One look and all that follows from it, if this process leads; whether there was more than one look brings."""
        ports = self._ports
        if not ports.lease.process or not ports.leases.lead("sweeps", ports.lease.process, LEADER_MS):
            if self._reachable_since is None:
                self._reachable_since = time.monotonic()
            return False
        if self._reachable_since is None:
            self._reachable_since = time.monotonic()
        found = ports.outbox.sweep(lost_after_ms=self.dead.lost_after_ms(), most=MOST)
        if found.silent and time.monotonic() - self._reachable_since >= ports.settings.lease_s:
            # a store that only stalled let leases run out as well: who lives renews when asked
            self.dead.question({process for process, _ in found.silent})
        for process in found.deposed:
            self.dead.pass_on_steps(process)
        send_unsent(ports, found.unsent)
        send_lost(ports, found)
        handle_due(ports, found.due)
        return max(len(found.due), len(found.unsent)) >= MOST
