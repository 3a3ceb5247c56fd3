"""What one worker process has of its own: ports, a lease that is kept alive, a session on the mesh. Made at the first
task, so after any fork."""

from __future__ import annotations

import atexit
import logging
import os
import threading

from orchestration.settings import Settings, load_settings
from orchestration.wiring import Ports, open_ports
from workers.leases import LeaseKeeper

log = logging.getLogger("turnmill.worker")

_lock = threading.Lock()
_current: Runtime | None = None


class Runtime:
    """The parts of this process."""

    def __init__(self, settings: Settings) -> None:
        self.pid = os.getpid()
        self.ports: Ports = open_ports(settings)
        self.keeper = LeaseKeeper(self.ports)
        self.keeper.start()
        if self.ports.project.tools:
            self.ports.mesh.serve(list(self.ports.project.tools.values()))
        for name in sorted(self.ports.project.agents):
            log.info("agent %s, snapshot %s", name, self.ports.project.snapshot(name))

    def close(self) -> None:
        """Give the lease back and close what is open."""
        self.keeper.stop()
        self.ports.mesh.close()
        self.ports.store.close()


def runtime() -> Runtime:
    """This process's runtime; made at the first call."""
    global _current
    if _current is None or _current.pid != os.getpid():
        with _lock:
            if _current is None or _current.pid != os.getpid():
                _current = Runtime(load_settings())
                atexit.register(close_runtime)
    return _current


def close_runtime() -> None:
    """Close this process's runtime, if it has one."""
    global _current
    with _lock:
        if _current is not None and _current.pid == os.getpid():
            closing, _current = _current, None
            closing.close()
