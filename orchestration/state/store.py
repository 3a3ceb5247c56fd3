"""The connection to Redis: one client per process, the scripts of `lua/`, and one translation of its faults.

Everything that must be atomic is a script; `lua/library/base.lua` opens with the table of keys. The other modules of this
folder give the scripts Python names and types.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from orchestration.core.errors import StoreUnavailable
from orchestration.settings import Settings

#: What a server says that is no primary any more: the next attempt goes to whatever the address leads to by then.
DEMOTED = (redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError)

#: How long a claim waits for a Redis that is away, in seconds. It may be given up then, since its message counts as lost.
CLAIM_PATIENCE_S = 600.0

#: Connections of one process; threads beyond that wait for a free one.
MAX_CONNECTIONS = 200

#: The parts of the shared library; each knows those before it.
LIBRARY = ("base", "steps", "approvals", "rounds", "turns")

Client = redis.Redis


@cache
def _source(name: str) -> str:
    return (Path(__file__).parent / "lua" / f"{name}.lua").read_text(encoding="utf-8")


def script_text(name: str, settings: Settings) -> str:
    """The whole text of one script: the shared library with the settings' bounds, the script, and the write of what it changed."""
    library = "\n".join(_source(f"library/{part}") for part in LIBRARY)
    bounds = {
        "frames_kept": settings.frames_kept,
        "turn_kept_s": settings.turn_kept_s,
        "conversation_kept_s": settings.conversation_kept_s,
        "approval_kept_s": settings.approval_kept_s,
        "audit_kept_s": settings.audit_kept_s,
        "lost_after_ms": int(settings.lost_after_s * 1000),
    }
    for bound, value in bounds.items():
        library = library.replace(f"${bound}", str(value))
    library = needed_of(library, _source(name))
    return f"{library}\nlocal function script()\n{_source(name)}\nend\nlocal answer = script()\nflush()\nreturn answer\n"


def needed_of(library: str, script: str) -> str:
    """The parts of the library that `script` uses, in their order: Redis makes every function that a text defines at each run, used or not.

    A part begins at a top-level `local`; what stands before the first is a comment. Of `local function`s those are left out
    that neither the script, nor `flush`, nor a part that stays names.
    """
    parts = re.split(r"^(?=local )", library, flags=re.MULTILINE)[1:]
    names = [re.match(r"local function (\w+)", part) for part in parts]
    wanted = set(re.findall(r"\w+", script)) | {"flush"}
    kept = [not name for name in names]
    for part, stays in zip(parts, kept, strict=True):
        if stays:
            wanted |= set(re.findall(r"\w+", part))
    for place in range(len(parts) - 1, -1, -1):  # a function names only those above it
        name = names[place]
        if name and name.group(1) in wanted:
            kept[place] = True
            wanted |= set(re.findall(r"\w+", parts[place]))
    return "".join(part for part, stays in zip(parts, kept, strict=True) if stays)


@contextmanager
def translated() -> Iterator[None]:
    """Redis's faults as StoreUnavailable; nothing of the command reaches the message."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError, redis.exceptions.ReadOnlyError, redis.exceptions.BusyLoadingError) as error:
        raise StoreUnavailable(f"the store does not answer ({type(error).__name__})") from error
    except (redis.exceptions.OutOfMemoryError, redis.exceptions.MasterDownError, redis.exceptions.TryAgainError) as error:
        raise StoreUnavailable(f"the store takes no writes ({type(error).__name__})") from error
    except redis.ResponseError as error:
        if any(word in str(error) for word in ("MISCONF", "OOM", "READONLY", "LOADING", "MASTERDOWN", "NOREPLICAS")):
            raise StoreUnavailable("the store takes no writes") from error
        raise


class Store:
    """Scripts and plain commands on one Redis. Safe for threads; makes its client anew in a forked child."""

    def __init__(self, settings: Settings, connect: Callable[[], Client] | None = None) -> None:
        self.settings = settings
        self._plain = connect is None
        self._connect = connect or self._open
        self._lock = threading.Lock()
        self._threads = threading.local()
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pid = 0
        self._client: Client | None = None
        self._scripts: dict[str, tuple[str, str]] = {}

    def _open(self) -> Client:
        pool = redis.BlockingConnectionPool.from_url(
            self.settings.redis_url,
            max_connections=MAX_CONNECTIONS,
            timeout=5,
            socket_timeout=10,
            socket_connect_timeout=2,
            socket_keepalive=True,
            health_check_interval=30,
            decode_responses=True,
            protocol=2,  # plain lists and no push messages to look for: less work for each reply
            # one silent reconnect: a connection that idled while Redis restarted is no fault of the caller's, and every
            # script is safe to run twice
            retry=Retry(NoBackoff(), 1),
            retry_on_error=list(DEMOTED),
            client_name="turnmill",
        )
        return redis.Redis(connection_pool=pool)

    @property
    def client(self) -> Client:
        """The process's client."""
        if self._client is None or self._pid != os.getpid():
            with self._lock:
                if self._client is None or self._pid != os.getpid():
                    self._scripts = {}
                    self._client = self._connect()
                    self._pid = os.getpid()
        return self._client

    def run(self, script: str, *args: str | int) -> Any:
        """Run one script of `lua/`; once more on a new connection when the old one broke, which every script bears.

        Raises:
            StoreUnavailable: Redis is away, full, loading or read-only; whether the script ran is then unknown.
        """
        client = self.client
        prepared = self._scripts.get(script)
        if prepared is None:
            text = script_text(script, self.settings)
            prepared = self._scripts[script] = (text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
        text, digest = prepared
        with translated():
            if self._plain:
                return self._evaluate(text, digest, args)
            return client.eval(text, 0, *args)

    def insist(self, script: str, *args: str | int, patience_s: float = math.inf) -> Any:
        """Run one script as `run` does, again and again while Redis is away: for what this process holds, and what would be
        held for nothing if it were not told.

        Raises:
            StoreUnavailable: `patience_s` seconds have passed.
        """
        give_up, pause = time.monotonic() + patience_s, 0.02
        while True:
            try:
                return self.run(script, *args)
            except StoreUnavailable:
                if time.monotonic() > give_up:
                    raise
                time.sleep(pause)
                pause = min(1.0, pause * 2)

    def _evaluate(self, text: str, digest: str, args: tuple[str | int, ...]) -> Any:
        """EVALSHA on this thread's own connection, without the layers that redis-py has for commands in general: a
        third of the CPU of a call."""
        connection = self._own_connection()
        for last in (False, True):
            try:
                try:
                    return self._exchange(connection, "EVALSHA", digest, args)
                except redis.exceptions.NoScriptError:
                    return self._exchange(connection, "EVAL", text, args)
            except (*DEMOTED, redis.ConnectionError, redis.TimeoutError):
                connection.disconnect()
                if last:
                    raise
            except redis.ResponseError:
                raise
            except BaseException:
                connection.disconnect()  # its reply may still be on the way
                raise
        raise AssertionError("not reached")

    @staticmethod
    def _exchange(connection: Any, command: str, script: str, args: tuple[str | int, ...]) -> Any:
        connection.send_packed_command(connection.pack_command(command, script, 0, *args), check_health=False)
        return connection.read_response()

    def _own_connection(self) -> Any:
        own = self._threads
        if getattr(own, "pid", 0) != os.getpid():
            own.connection, own.pid = self.client.connection_pool.make_connection(), os.getpid()
            self._connections.add(own.connection)
        return own.connection

    def hash(self, key: str) -> dict[str, str]:
        """All of one hash; empty when there is none."""
        with translated():
            return cast(dict[str, str], self.client.hgetall(key))

    def entries(self, key: str, first: int, last: int) -> list[str]:
        """Part of one list."""
        with translated():
            return cast(list[str], self.client.lrange(key, first, last))

    def close(self) -> None:
        """Close the connections."""
        for connection in list(self._connections):
            connection.disconnect()
        if self._client is not None:
            self._client.close()
            self._client = None


def turn_key(tenant: str, turn_id: str) -> str:
    """Where a turn's journal is."""
    return f"tm:{tenant}:turn:{turn_id}"


def conversation_key(tenant: str, conversation_id: str) -> str:
    """Where a conversation is; `:log`, `:mail`, `:frames`, `:live` stand behind it."""
    return f"tm:{tenant}:conv:{conversation_id}"


def approval_key(tenant: str, approval_id: str) -> str:
    """Where an approval is."""
    return f"tm:{tenant}:ap:{approval_id}"


def texts(values: Sequence[Any]) -> list[str]:
    """A reply's values as text."""
    return [str(value) for value in values]
