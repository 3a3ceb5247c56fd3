"""Keeps this process's lease: renews it for all its running steps at once, answers whoever asks whether it lives, takes a
new one when it was deposed, and hands back steps that the process holds and does not work on any more."""

from __future__ import annotations

import logging
import threading
import time

from orchestration.core.errors import StoreUnavailable
from orchestration.wiring import Ports
from workers.given_up import hand_back

log = logging.getLogger("turnmill.lease")

#: How often what was sent is confirmed when no other call to Redis carries it, in seconds.
CONFIRM_EVERY_S = 0.3


class LeaseKeeper:
    """A thread that renews at every third of the lease, and at once when asked."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._announced = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turnmill-lease", daemon=True)

    def start(self) -> None:
        """Take the lease and keep it."""
        self._thread.start()

    def _announce(self) -> None:
        process = self._ports.lease.process
        if process != self._announced:
            self._ports.mesh.announce_process(process)
            self._announced = process

    def stop(self) -> None:
        """Give the lease back."""
        self._stopping.set()
        self._thread.join(timeout=CONFIRM_EVERY_S + 2)
        try:
            if self._ports.lease.process:
                self._ports.lease.renew()
                self._ports.lease.give_back()
        except StoreUnavailable:
            log.warning("the lease could not be given back; it ends by itself")

    def _run(self) -> None:
        lease, every = self._ports.lease, self._ports.settings.lease_s / 3
        since_renewal = every
        looked = time.monotonic()
        while not self._stopping.is_set():
            try:
                if not lease.process:
                    lease.register()
                    since_renewal = 0.0
                self._announce()
                asked = lease.wait_for_question(CONFIRM_EVERY_S)
                since_renewal += CONFIRM_EVERY_S
                if asked or since_renewal >= every or self._ports.outbox.unconfirmed:
                    process = lease.process
                    if not lease.renew():
                        log.warning("this process was taken for dead; its steps were passed on, and it goes on under a new lease")
                        lease.register(instead_of=process)
                    since_renewal = 0.0
                if lease.look.is_set() or time.monotonic() - looked >= every:
                    lease.look.clear()
                    hand_back(self._ports)
                    looked = time.monotonic()
            except StoreUnavailable as error:
                log.warning("lease not renewed: %s", error)
                self._stopping.wait(0.2)
            except Exception:
                log.exception("lease not renewed")
                self._stopping.wait(1.0)
