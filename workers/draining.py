"""A graceful stop with an end: Celery's thread pool waits for running tasks without limit, so after `drain_s` the
process hands its steps on and leaves."""

from __future__ import annotations

import logging
import os
import threading

from orchestration.core.errors import StoreUnavailable
from orchestration.wiring import Ports

log = logging.getLogger("turnmill.worker")


def leave_after(ports: Ports, drain_s: float) -> threading.Timer:
    """Give running steps `drain_s` seconds, then hand on what still runs and end the process, whatever its threads wait for."""
    timer = threading.Timer(drain_s, _leave, (ports,))
    timer.daemon = True
    timer.start()
    return timer


def _leave(ports: Ports) -> None:
    running = len(ports.leases.steps_of(ports.lease.process))
    log.warning("still %d step(s) under way after the time to stop; they are handed on", running)
    hand_on_and_exit(ports, os.EX_OK)


def hand_on_and_exit(ports: Ports, status: int) -> None:
    """End the process at once; its lease is given back, so that others take its steps without waiting for silence."""
    try:
        ports.lease.give_back()
    except StoreUnavailable:
        log.warning("the lease could not be given back; it ends by itself")
    logging.shutdown()
    os._exit(status)
