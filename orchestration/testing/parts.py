"""One real process of a deployment, as a test or the demo handles it: start, wait until it is ready, kill, pause, restart, read its log.

It knows no command of Turnmill's; which processes make a deployment is `stack.py`'s business.
"""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from orchestration.testing import tether

#: Seconds that a process may take until it is ready; a loaded machine needs far more than a quiet one.
READY_S = 90.0

#: Lines of a log that a failure shows.
TAIL_LINES = 40


class NotReady(Exception):
    """A process ended, or took too long, before it was ready; the message carries the end of its log."""


class Part:
    """A process with a name, a log file and a condition for being ready.

    Args:
        command: its words; the program is looked up on the `PATH` of `env`.
        env: its whole environment.
        log: the file that receives its output; kept over restarts.
        ready: answers whether it is ready, given what it has logged since its last start; None means as soon as it runs.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        ready: Callable[[str], bool] | None = None,
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.env = dict(env)
        self.log_path = log
        self._cwd = cwd
        self._ready = ready
        self._child: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._asked = False

    @property
    def running(self) -> bool:
        """Whether the process is there (paused counts)."""
        return self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int:
        """Its process id. Raises RuntimeError when it does not run."""
        return self._running_child().pid

    @property
    def status(self) -> int | None:
        """The exit status of its last end; None while it runs or when it never ran."""
        return self._child.poll() if self._child is not None else None

    def start(self) -> Part:
        """Start it without waiting; nothing happens when it runs."""
        if not self.running:
            if self._child is not None:
                tether.end(self._child, grace_s=0)  # what an ended process left in its group
            with self.log_path.open("ab") as log:
                self._log_start = log.tell()
                self._asked = False
                self._child = tether.spawn(self.command, env=self.env, cwd=self._cwd, output=log)
        return self

    def wait_ready(self, timeout_s: float = READY_S) -> Part:
        """Wait until it is ready. Raises NotReady when it ends before, or after `timeout_s` seconds."""
        child = self._running_child(just_started=True)
        deadline = time.monotonic() + timeout_s
        while self._ready is not None and not self._ready(self.log()):
            if child.poll() is not None:
                raise NotReady(f"{self.name} ended with status {child.returncode} before it was ready\n{self.tail()}")
            if time.monotonic() > deadline:
                raise NotReady(f"{self.name} was not ready after {timeout_s:g} s\n{self.tail()}")
            time.sleep(0.05)
        return self

    def stop(self, grace_s: float = 30.0) -> int:
        """End it in an orderly way (SIGTERM, after `grace_s` seconds SIGKILL); returns its exit status."""
        if self._child is None:
            return 0
        if self._child.poll() is None:
            tether.signal_group(self._child, signal.SIGCONT)  # a paused process could not hear SIGTERM
        return tether.end(self._child, grace_s=grace_s, asked=self._asked)

    def terminate(self) -> None:
        """Ask it to end (SIGTERM) without waiting; nothing happens when it does not run."""
        if self._child is not None and self._child.poll() is None:
            tether.signal_group(self._child, signal.SIGCONT)
            tether.signal_group(self._child, signal.SIGTERM)
            self._asked = True

    def kill(self) -> None:
        """kill -9, its children included."""
        tether.end(self._running_child(), grace_s=0)

    def pause(self) -> None:
        """SIGSTOP: its connections stay open and nothing answers."""
        tether.signal_group(self._running_child(), signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT after `pause()`."""
        tether.signal_group(self._running_child(), signal.SIGCONT)

    def restart(self) -> Part:
        """Stop, start, wait until it is ready."""
        self.stop()
        return self.start().wait_ready()

    def log(self) -> str:
        """What it logged since its last start."""
        with contextlib.suppress(FileNotFoundError), self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")
        return ""

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of its log, under a heading with its name."""
        shown = "\n".join(self.log().splitlines()[-lines:])
        return f"--- {self.name} (the end of its log)\n{shown}\n"

    def _running_child(self, *, just_started: bool = False) -> subprocess.Popen[bytes]:
        if self._child is None or (self._child.poll() is not None and not just_started):
            raise RuntimeError(f"{self.name} is not running")
        return self._child


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = READY_S) -> None:
    """Wait until `condition()` is true. Raises TimeoutError, naming `what`, after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not seen within {timeout_s:g} s: {what}")
        time.sleep(0.05)


def answers_http(url: str) -> bool:
    """Whether a GET of `url` is answered with a status below 400."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=2)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status < 400
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def answers_tcp(port: int) -> bool:
    """Whether something accepts connections on this port of loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
