"""Starts child processes that cannot outlive this one: a watcher process holds a pipe, and when the pipe closes it kills what is left.

The kernel closes the pipe even after kill -9, on Linux and macOS alike, and whole process groups are killed, so children of children
go too. What the children are, and whether they are ready, is the business of `processes.py` and `servers.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

#: Seconds that a process group gets between SIGTERM and SIGKILL unless the caller says otherwise.
GRACE_S = 10.0

# The watcher is a program of the standard library alone, started isolated (-I -S): cheap, and it imports nothing of the user's.
# It reads lines "+g PID", "-g PID", "+d DIRECTORY", "-d DIRECTORY"; the end of its input is its signal to act.
_WATCHER = """
import os, shutil, signal, sys
groups, directories = set(), set()
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
for line in sys.stdin:
    what, _, value = line.rstrip("\\n").partition(" ")
    if what in ("+g", "-g"):
        (groups.add if what[0] == "+" else groups.discard)(int(value))
    else:
        (directories.add if what[0] == "+" else directories.discard)(value)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
for directory in directories:
    shutil.rmtree(directory, ignore_errors=True)
"""


class _Watcher:
    """This process's only watcher, started with the first child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._groups: set[int] = set()

    def tell(self, what: str, value: str) -> None:
        with self._lock:
            stdin = self._started()
            stdin.write(f"{what} {value}\n")
            stdin.flush()

    def start(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, output: IO[bytes] | int) -> subprocess.Popen[bytes]:
        with self._lock:
            stdin = self._started()  # before the child, so that no child is ever without a watcher
            child = subprocess.Popen(
                list(command),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._groups.add(child.pid)
            stdin.write(f"+g {child.pid}\n")
            stdin.flush()
            return child

    def forget(self, pid: int) -> None:
        with self._lock:
            if pid in self._groups:
                self._groups.discard(pid)
                stdin = self._started()
                stdin.write(f"-g {pid}\n")
                stdin.flush()

    def _started(self) -> IO[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WATCHER],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # a Ctrl-C in the terminal, or a kill of our group, must not take the watcher along
            )
            assert self._process.stdin is not None
            for group in self._groups:
                self._process.stdin.write(f"+g {group}\n")
        assert self._process.stdin is not None
        return self._process.stdin

    def close(self) -> None:
        with self._lock:
            if self._process is None:
                return
            process, self._process = self._process, None
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.wait()

    def leave_in_forked_child(self) -> None:
        # A forked child that kept the pipe open would keep the watcher from seeing that we are gone.
        process, self._process = self._process, None
        self._lock = threading.Lock()
        self._groups = set()
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                os.close(process.stdin.fileno())


_watcher = _Watcher()
os.register_at_fork(after_in_child=_watcher.leave_in_forked_child)
atexit.register(_watcher.close)


def spawn(command: Sequence[str], *, env: Mapping[str, str], cwd: Path, output: IO[bytes] | int) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of a process group of its own that ends with this process.

    Args:
        env: its whole environment.
        output: where its standard output and error go, a file or `subprocess.PIPE`.

    Raises:
        OSError: the program cannot be started.
    """
    return _watcher.start(command, env, cwd, output)


def signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to the child's whole process group; nothing happens when it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def end(child: subprocess.Popen[bytes], *, grace_s: float = GRACE_S, asked: bool = False) -> int:
    """End a spawned process and its group: SIGTERM, then after `grace_s` seconds SIGKILL; 0 kills at once. Returns its exit status.

    Args:
        asked: SIGTERM was sent before; a second one would make some programs hurry.
    """
    if child.poll() is None and grace_s > 0:
        if not asked:
            signal_group(child, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    signal_group(child, signal.SIGKILL)  # also what its group left behind
    status = child.wait()
    _watcher.forget(child.pid)
    return status


def temporary_directory(prefix: str) -> Path:
    """A new directory that is removed when this process ends, however it ends, or by `remove_directory`."""
    path = Path(tempfile.mkdtemp(prefix=prefix))
    _watcher.tell("+d", str(path))
    return path


def remove_directory(path: Path) -> None:
    """Remove a directory that `temporary_directory` made."""
    shutil.rmtree(path, ignore_errors=True)
    _watcher.tell("-d", str(path))
