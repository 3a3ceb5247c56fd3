"""What the server under the app must do and ASGI has no words for: bound what strangers can make it keep, ping, and stop in a bounded time.

Whoever starts `uvicorn gateway.app:app` need not know of it: the app sets its server up as it starts. Servers other than uvicorn are left
as they are.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

#: Seconds between two pings of a WebSocket, and uvicorn's own choice, which ours replaces.
PING_S, UVICORN_PING_S = 30.0, 20.0

#: Seconds that a stop gives to connections that do not end by themselves. Streams and channels are ended at once.
STOP_S = 10

#: Bytes of a request's first line and headers together, and seconds in which they must be complete.
MAX_HEAD_BYTES, HEAD_S = 65_536, 30.0

#: Bytes that a channel may send while it does not take what it is sent; pieces of one message; pings and pongs in a second.
MAX_UNHEARD_BYTES, MAX_FRAGMENTS, MAX_CONTROLS_PER_S = 4_194_304, 5_000, 100

#: Bytes on the wire that one byte of a body may take: a chunk of its own, with a spare.
_WIRE_BYTES = 9


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's own protocol, which by itself takes heads of any size for as long as they come, and keeps them in memory."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._spent = 0
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(HEAD_S, self._hang_up)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._head_timer = self.loop.call_later(HEAD_S, self._hang_up)
        self._spent += len(data)
        super().data_received(data)
        # Bytes of a body that was handed on do not count; what is left is head, trailers, and the framing of chunks.
        if self._spent > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_body(self, body: bytes) -> None:
        self._spent -= len(body) * _WIRE_BYTES
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._spent = 0
        self._forget_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._spent = 0
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        super().connection_lost(exc)

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self) -> None:
        told = f"the first line and headers of a request may have {MAX_HEAD_BYTES} bytes together"
        title = "Request Header Fields Too Large"
        body = json.dumps({"type": "about:blank", "title": title, "status": 431, "detail": told, "code": "headers_too_large"}).encode()
        if self.cycle is None or self.cycle.response_complete:
            head = ("content-type: application/problem+json", f"content-length: {len(body)}", "connection: close")
            self.transport.write("\r\n".join((f"HTTP/1.1 431 {title}", *head, "", "")).encode() + body)
        self._hang_up()

    def _hang_up(self) -> None:
        self._head_timer = None
        self.transport.close()


class BoundedChannels(WebSocketsSansIOProtocol):
    """uvicorn's own protocol, which answers any number of pings to a peer that does not read, and keeps any number of pieces of a message.

    Who does such things is hung up on without a word; no client that works ever meets these bounds.
    """

    _unheard = 0
    _controls = 0
    _controls_since = 0.0

    def data_received(self, data: bytes) -> None:
        self._unheard = 0 if self.writable.is_set() else self._unheard + len(data)
        if self._unheard > MAX_UNHEARD_BYTES:
            self.transport.abort()
            return
        super().data_received(data)
        if len(self.frames) > MAX_FRAGMENTS:
            self.transport.abort()

    def handle_ping(self) -> None:
        if self._within_bounds():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self._within_bounds():
            super().handle_pong(event)

    def _within_bounds(self) -> bool:
        now = self.loop.time()
        if now - self._controls_since > 1.0:
            self._controls_since, self._controls = now, 0
        self._controls += 1
        if self._controls > MAX_CONTROLS_PER_S:
            self.transport.abort()
        return self._controls <= MAX_CONTROLS_PER_S


def raise_file_limit() -> None:
    """Let this process open as many files as its operator allows at all: each stream is one, and the usual first bound is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def tune_server(send: Send, argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Set up the uvicorn that runs this app, unless its operator chose otherwise: what comes in is bounded, a ping goes out every `PING_S`
    seconds, and a stop waits for open connections `STOP_S` seconds and not for ever, which one client that does not read would make of it.

    `send` is that of the lifespan; uvicorn's belongs to an object that holds its configuration.
    """
    config: Any = getattr(getattr(send, "__self__", None), "config", None)
    if config is None:
        return
    for option, usual, ours in (("ws_ping_interval", UVICORN_PING_S, PING_S), ("timeout_graceful_shutdown", None, STOP_S)):
        word = f"--{option.replace('_', '-')}"
        chosen = f"UVICORN_{option.upper()}" in environ or any(given.partition("=")[0] == word for given in argv)
        if not chosen and getattr(config, option, ours) == usual:
            setattr(config, option, ours)
    if getattr(config, "http_protocol_class", None) is HttpToolsProtocol:
        config.http_protocol_class = BoundedHeads
    if getattr(config, "ws_protocol_class", None) is WebSocketsSansIOProtocol:
        config.ws_protocol_class = BoundedChannels
