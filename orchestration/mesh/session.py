"""One Zenoh session per process, opened when it is first used: endpoints, mode, reconnecting, and declarations that outlive the hub.

Nothing here knows tools. Who only wants liveliness needs no Zenoh of its own; who asks or serves gets the session itself.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import zenoh

from orchestration.core.errors import MeshUnavailable, Misconfigured
from orchestration.settings import Settings

log = logging.getLogger(__name__)

#: How fast a lost connection is tried again, in milliseconds: soon, since a worker without the hub looks dead to others.
RETRY = {"period_init_ms": 100, "period_max_ms": 1000, "period_increase_factor": 2}

#: How long opening waits before it is tried again after a failure that is no absent hub (a certificate, say), in seconds.
REOPEN_S = 2.0

#: A first connection that took longer than this, in seconds, was waited for: the hub has only just started.
AT_ONCE_S = 0.25

#: For how long after a hub was reached others may still be on their way back to it, in seconds: they try once a second.
SETTLE_S = 2.5


class Undeclarable(Protocol):
    """What Zenoh gives back for a declaration."""

    def undeclare(self) -> Any: ...


class Declaration:
    """Something declared on the mesh: at once, or as soon as the session opens. `undeclare` takes it back; twice does nothing."""

    def __init__(self, make: Callable[[zenoh.Session], Undeclarable], on_end: Callable[[Declaration], None]) -> None:
        self._make = make
        self._on_end = on_end
        self._lock = threading.Lock()
        self._made: Undeclarable | None = None
        self._withdrawn = False

    def apply(self, session: zenoh.Session) -> None:
        """Declare it on `session`, unless it was taken back or declared already."""
        with self._lock:
            if self._made is None and not self._withdrawn:
                self._made = self._make(session)

    def undeclare(self) -> None:
        """Take it back."""
        with self._lock:
            self._withdrawn = True
            made, self._made = self._made, None
        self._on_end(self)
        if made is not None:
            try:
                made.undeclare()
            except zenoh.ZError:  # the session was closed first, which takes back everything
                log.debug("a declaration ended with its session")


class MeshSession:
    """The process's session. Safe for threads. May be made before a fork but not opened: each child opens its own.

    The mode follows from the endpoints: `client` where there is somebody to connect to and nothing to listen on, else `peer`;
    `router` for the hub, which passes it. A Zenoh configuration file may say otherwise. A client asks for everything
    through its hub, so a replica of a tool is found whatever its address, and one replica is asked; peers reach one another
    directly.
    """

    def __init__(self, settings: Settings, *, mode: str | None = None) -> None:
        self._settings = settings
        self._mode = mode
        self._lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._session: zenoh.Session | None = None
        self._ready = threading.Event()
        self._opening = False
        self._closed = False
        self._linked_at = float("-inf")
        self._links: Any = None
        # Kept until they are taken back: Zenoh ends what nobody refers to.
        self._declarations: dict[Declaration, None] = {}

    def start(self) -> None:
        """Begin to open the session, without waiting for a hub that is not up yet: it is tried for ever in the background.

        Raises:
            Misconfigured: endpoints or configuration file cannot work, a listening address is taken, or a parent process had
                opened its session before it forked this one.
        """
        if os.getpid() != self._pid:
            self._left_to_parent = self._session  # ending it here would speak for the parent
            self._reset()
        if _opened_in not in (0, os.getpid()):
            raise Misconfigured("this process was forked after the mesh session had been opened; Zenoh's threads did not come along")
        with self._lock:
            if self._closed or self._session is not None or self._opening:
                return
            config, mode = self._config()
            _mark_opened()
            if mode == "client":
                self._opening = True
                threading.Thread(target=self._open_client, args=(config,), name="mesh-open", daemon=True).start()
                return
            try:
                self._opened(zenoh.open(config))
            except zenoh.ZError as error:
                raise Misconfigured(f"the mesh session cannot open as {mode}: {_first_line(error)}") from None

    def opened(self, timeout_s: float) -> zenoh.Session:
        """The open session, waiting at most `timeout_s` seconds for the first connection.

        Raises:
            MeshUnavailable: closed, or no hub answered in time; it goes on trying.
        """
        if self._session is None or self._pid != os.getpid():
            self.start()
        if not self._ready.wait(timeout_s) or self._session is None or self._closed:
            raise MeshUnavailable("there is no connection to the mesh yet" if not self._closed else "the mesh session is closed")
        return self._session

    @property
    def connected(self) -> bool:
        """Whether the session is open and, where it has endpoints to connect to, linked to somebody."""
        session = self._session
        if session is None or self._closed or self._pid != os.getpid():
            return False
        return not self._settings.mesh_connect or bool(session.info.transports())

    @property
    def settling(self) -> bool:
        """Whether the hub came back, or came up at last, a moment ago: others may still be on their way to it. Of a return that
        nobody asked about it is true for a moment after the next question."""
        links = self._links
        try:
            while links is not None and (event := links.try_recv()) is not None:
                if event.kind == zenoh.SampleKind.PUT and event.transport.whatami == zenoh.WhatAmI.ROUTER:
                    self._linked_at = time.monotonic()
        except zenoh.ZError:  # the session has ended
            return False
        return time.monotonic() - self._linked_at < SETTLE_S

    def close(self) -> None:
        """Close the session and take back all that was declared. It stays closed; a second call does nothing."""
        with self._lock:
            if self._closed or self._pid != os.getpid():
                return
            self._closed = True
            session = self._session
            self._ready.set()
        if session is not None:
            session.close()  # type: ignore[no-untyped-call]

    def declare(self, make: Callable[[zenoh.Session], Undeclarable]) -> Declaration:
        """Declare what `make` makes, now or once the session is open. Zenoh declares it again after every reconnect."""
        self.start()
        declaration = Declaration(make, lambda ended: self._declarations.pop(ended, None))
        with self._lock:
            session = self._session
            self._declarations[declaration] = None
        if session is not None and not self._closed:
            declaration.apply(session)
        return declaration

    def declare_liveliness(self, key: str) -> Declaration:
        """Hold a token at `key` for as long as this process lives; who watches it learns of its end at once."""
        return self.declare(lambda session: session.liveliness().declare_token(key))

    def watch_liveliness(self, pattern: str, on_put: Callable[[str], None], on_drop: Callable[[str], None]) -> Declaration:
        """Hear of each token that matches the key expression `pattern`, those already there first.

        A lost hub drops every token behind it, and puts those that still live when it is back: a drop is a suspicion. The
        callbacks get the token's key, in order, on a thread of their own.
        """

        def heard(sample: zenoh.Sample) -> None:
            try:
                (on_put if sample.kind == zenoh.SampleKind.PUT else on_drop)(str(sample.key_expr))
            except Exception:
                log.exception("a liveliness watcher failed")

        return self.declare(lambda session: session.liveliness().declare_subscriber(pattern, heard, history=True))

    def subscribe(self, pattern: str, on_message: Callable[[str, bytes], None]) -> Declaration:
        """Hear what is published on keys that match `pattern`: `(key, payload)`, in order, on a thread of its own."""

        def heard(sample: zenoh.Sample) -> None:
            try:
                on_message(str(sample.key_expr), sample.payload.to_bytes())
            except Exception:
                log.exception("a subscriber of the mesh failed")

        return self.declare(lambda session: session.declare_subscriber(pattern, heard))

    def publish(self, key: str, payload: bytes) -> None:
        """Publish `payload` on `key`, best effort: nobody acknowledges it.

        Raises:
            MeshUnavailable: there is no open session.
        """
        self.opened(0).put(key, payload)

    def _open_client(self, config: zenoh.Config) -> None:
        """Zenoh itself waits for ever for an absent hub; what it refuses at once is tried again after a pause."""
        complained, began = False, time.monotonic()
        while not self._closed:
            try:
                session = zenoh.open(config)
            except zenoh.ZError as error:
                if not complained:
                    log.error("the mesh session cannot open yet: %s", _first_line(error))
                    complained = True
                time.sleep(REOPEN_S)
                continue
            if time.monotonic() - began > AT_ONCE_S:
                self._linked_at = time.monotonic()
            self._opened(session)
            return

    def _opened(self, session: zenoh.Session) -> None:
        with self._lock:
            self._opening = False
            if self._closed:
                session.close()  # type: ignore[no-untyped-call]
                return
            self._session = session
            # Read when somebody wants to know: a callback of Zenoh's into an interpreter that ends would abort the process.
            self._links = session.info.declare_transport_events_listener(zenoh.handlers.RingChannel(8))
            waiting = list(self._declarations)
        _OPEN.add(self)
        for declaration in waiting:
            try:
                declaration.apply(session)
            except zenoh.ZError as error:
                log.error("a declaration was refused: %s", _first_line(error))
        self._ready.set()

    def _config(self) -> tuple[zenoh.Config, str]:
        settings = self._settings
        try:
            config = zenoh.Config.from_file(Path(settings.mesh_config)) if settings.mesh_config else zenoh.Config()
        except (zenoh.ZError, OSError) as error:
            raise Misconfigured(f"TURNMILL_MESH_CONFIG: {settings.mesh_config} cannot be used: {_first_line(error)}") from None
        default = zenoh.Config()
        connect = list(settings.mesh_connect) or _get(config, "connect/endpoints")
        listen = list(settings.mesh_listen)
        if not listen and _get(config, "listen/endpoints") != _get(default, "listen/endpoints"):
            listen = _get(config, "listen/endpoints")
        mode = self._mode or _get(config, "mode") or ("client" if connect and not listen else "peer")
        laid: dict[str, Any] = {"mode": mode, "connect/endpoints": connect, "listen/endpoints": listen}
        if _get(config, "scouting/multicast/enabled") is None:
            laid["scouting/multicast/enabled"] = False
        if not settings.mesh_config:
            # Segments in /dev/shm outlive a killed process and are scarce in containers; a configuration file may want them.
            laid["transport/shared_memory/enabled"] = False
        for name, value in (("connect/timeout_ms", -1), ("connect/exit_on_failure", False), ("connect/retry", RETRY)):
            if _get(config, name) is None:
                laid[name] = value
        try:
            for name, value in laid.items():
                config.insert_json5(name, json.dumps(value))
        except zenoh.ZError as error:
            raise Misconfigured(f"the mesh endpoints cannot be used: {_first_line(error)}") from None
        return config, str(mode)


def barrier(session: zenoh.Session) -> bool:
    """Wait, for a second at most, until all that was asked of the hub before has been answered; whether it answers at all."""
    return all(reply.ok is not None for reply in session.get(_BARRIER, consolidation=zenoh.ConsolidationMode.NONE, timeout=1.0))


#: A key that nobody serves: the hub itself says so.
_BARRIER = ".turnmill/barrier"

#: The process that uses Zenoh's threads, 0 for none yet.
_opened_in = 0

_OPEN: weakref.WeakSet[MeshSession] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """An interpreter that ends with an open session may hang in Zenoh's threads."""
    for session in list(_OPEN):
        session.close()


def _mark_opened() -> None:
    global _opened_in
    _opened_in = os.getpid()


def _get(config: zenoh.Config, name: str) -> Any:
    return json.loads(config.get_json(name))


def _first_line(error: Exception) -> str:
    """Zenoh's message without the places in its source."""
    return str(error).split(" at /")[0].splitlines()[0][:300] if str(error) else type(error).__name__
