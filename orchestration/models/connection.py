"""One HTTP exchange with a model's server: a shared pool of connections, all time limits, a bound on the size, errors as `ModelError`.

What is sent and what comes back is the business of the adapters. Nothing is tried twice here and nobody waits: a pause that a
server asks for goes up as `retry_after_s`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from queue import SimpleQueue
from urllib.request import getproxies

import httpx

from orchestration.core.errors import ModelError
from orchestration.core.model import ModelFault
from orchestration.models.error_text import Shown
from orchestration.models.faults import fault_of_answer, truncated, unreadable

#: Bytes of one answer above which it counts as unreadable.
MAX_REPLY_BYTES = 32 * 1024 * 1024

#: Bytes that are read of an answer other than 2xx.
MAX_ERROR_BYTES = 64 * 1024

#: Answers that wait for their last bytes to be read; one more has its connection closed.
_MAX_DRAINING = 32

#: Seconds within which a connection must stand.
CONNECT_TIMEOUT_S = 10.0


class _Pool:
    """The process's one client, made when first asked for. A forked child starts with none: sockets cannot be shared."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None
        self._parents: list[httpx.Client] = []
        os.register_at_fork(after_in_child=self._forget)

    def client(self) -> httpx.Client:
        with self._lock:
            if self._client is None:
                self._client = _new_client()
            return self._client

    def close(self) -> None:
        """Close all idle connections; the next call opens new ones."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _forget(self) -> None:
        # The lock may have been held by a thread that does not exist here. The parent's client is kept, not closed:
        # closing it would say goodbye on the parent's TLS connections.
        self._lock = threading.Lock()
        if self._client is not None:
            self._parents.append(self._client)
            self._client = None


def _new_client() -> httpx.Client:
    # Keep-alive probes find a machine that died in the middle of a long silence, which a model thinking is not.
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=128, keepalive_expiry=20.0)
    # A mount, since a `transport` would switch off the proxies that the environment names; those for one scheme go before it.
    context = httpx.create_ssl_context()
    mounts = {} if "all" in getproxies() else {"all://": httpx.HTTPTransport(verify=context, limits=limits, socket_options=options)}
    # Servers of many tenants share this client, so it keeps no cookies.
    cookies = CookieJar(policy=DefaultCookiePolicy(allowed_domains=[]))
    return httpx.Client(verify=context, limits=limits, mounts=mounts, cookies=cookies, follow_redirects=False)


pool = _Pool()


@dataclass(frozen=True, slots=True)
class Call:
    """One request to a model's server. `who` names model and server in errors; times are in seconds."""

    who: str
    url: str
    headers: Mapping[str, str]
    body: bytes
    timeout_s: float
    read_timeout_s: float
    shown: Shown


@contextmanager
def asked(call: Call) -> Iterator[Iterator[bytes]]:
    """Send `call` and give the pieces of its good answer as they arrive. Leaving the block closes what was not read.

    Raises:
        ModelError: no connection, too long a silence, `timeout_s` over (`unavailable`); any status but 2xx (by what it
            says); a connection cut in the answer (`truncated`); an answer above `MAX_REPLY_BYTES` (`protocol`).
    """
    deadline = time.monotonic() + call.timeout_s
    silence_s = min(call.read_timeout_s, call.timeout_s)
    timeout = httpx.Timeout(silence_s, connect=min(CONNECT_TIMEOUT_S, call.timeout_s))
    client = pool.client()
    try:
        request = client.build_request("POST", call.url, content=call.body, headers=dict(call.headers), timeout=timeout)
        response = client.send(request, stream=True)
    except httpx.HTTPError as error:
        raise _unreachable(call, error, silence_s) from None
    except (httpx.InvalidURL, UnicodeError, ValueError):
        raise ModelError(ModelFault.BAD_REQUEST, f"{call.who}: the request could not be written", retryable=False) from None
    kept = False
    try:
        if not response.is_success:
            body = _some(response, deadline)
            raise fault_of_answer(call.who, response.status_code, response.headers, body, call.shown)
        pieces = _Pieces(call, response, deadline, silence_s)
        yield pieces
        kept = drain.take(pieces)
    finally:
        if not kept:
            response.close()


class _Pieces:
    """The pieces of an answer. No generator: one that a reader leaves early would close the connection behind it."""

    def __init__(self, call: Call, response: httpx.Response, deadline: float, silence_s: float) -> None:
        self._call = call
        self._response = response
        self._raw = response.iter_bytes()
        self._deadline = deadline
        self._silence_s = silence_s
        self._size = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        call = self._call
        try:
            piece = next(self._raw)
        except httpx.DecodingError:
            raise unreadable(call.who, "the answer's compression is broken") from None
        except httpx.TimeoutException as error:
            raise _unreachable(call, error, self._silence_s) from None
        except httpx.HTTPError:
            raise truncated(call.who) from None
        self._size += len(piece)
        if self._size > MAX_REPLY_BYTES:
            raise unreadable(call.who, f"the answer is larger than {MAX_REPLY_BYTES} bytes")
        if time.monotonic() > self._deadline:
            raise _late(call)
        return piece

    @property
    def over(self) -> bool:
        """Whether the answer has been read to its end, or broke; its connection is settled then."""
        return self._response.is_closed

    def rest(self) -> None:
        """Read what follows what counts, so that the connection can be used again; give it up when that is more than an end."""
        size = 0
        try:
            for piece in self._raw:
                size += len(piece)
                if size > MAX_ERROR_BYTES:
                    break
        except httpx.HTTPError:
            pass
        finally:
            self._response.close()


class _Drain:
    """Reads the ends of answers in a thread of its own.

    The last event tells that an answer is whole; the end of the HTTP message comes a moment later, and from some servers
    never. A connection is free for the next call only after it, but no step should wait for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Pieces] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._parents: list[SimpleQueue[_Pieces]] = []
        os.register_at_fork(after_in_child=self._forget)

    def take(self, pieces: _Pieces) -> bool:
        """Whether `pieces` will be read to their end; if not, the connection is to be closed."""
        if pieces.over or self._queue.qsize() >= _MAX_DRAINING:
            return False
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="turnmill-model-drain", daemon=True)
                self._thread.start()
        self._queue.put(pieces)
        return True

    def _run(self) -> None:
        while True:
            self._queue.get().rest()

    def _forget(self) -> None:
        # What waits belongs to the parent; kept, since letting go of it would close connections of the parent's pool.
        self._parents.append(self._queue)
        self._lock = threading.Lock()
        self._queue = SimpleQueue()
        self._thread = None


drain = _Drain()


def _some(response: httpx.Response, deadline: float) -> bytes:
    """The beginning of an error's body; whatever stops the reading, what came before it still tells something."""
    body = bytearray()
    try:
        for piece in response.iter_bytes():
            body += piece
            if len(body) >= MAX_ERROR_BYTES or time.monotonic() > deadline:
                break
    except httpx.HTTPError:
        pass
    return bytes(body[:MAX_ERROR_BYTES])


def _late(call: Call) -> ModelError:
    return ModelError(ModelFault.UNAVAILABLE, f"{call.who} did not finish within {call.timeout_s:g} s", retryable=True)


def _unreachable(call: Call, error: httpx.HTTPError, silence_s: float) -> ModelError:
    match error:
        case httpx.ConnectTimeout():
            what = "no connection in time"
        case httpx.TimeoutException():
            what = f"silent for {silence_s:g} s"
        case httpx.ConnectError():
            # The operating system's words: refused, unknown name, certificate.
            what = f"no connection: {call.shown.of(str(error))}"
        case httpx.LocalProtocolError() | httpx.UnsupportedProtocol():
            # Its text may quote a header, and so a key.
            return ModelError(ModelFault.BAD_REQUEST, f"{call.who}: the request could not be written", retryable=False)
        case _:
            what = f"the connection broke before the answer ({type(error).__name__})"
    return ModelError(ModelFault.UNAVAILABLE, f"{call.who}: {what}", retryable=True)
