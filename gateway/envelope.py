"""What every answer has around it: headers for browsers and proxies, a count, and a clean end when something unforeseen fails.

An unforeseen exception is logged by its kind and place alone, since its message may hold what a user sent.
"""

from __future__ import annotations

import logging
import time
import traceback

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import rates
from gateway.metrics import Meters
from gateway.problems import internal_error

log = logging.getLogger(__name__)

_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}

#: Told to browsers of a gateway that is reached over TLS: for a year, come over TLS only.
_SECURE = {b"strict-transport-security": b"max-age=31536000"}


class Envelope:
    """ASGI middleware: adds the headers that an answer does not set itself, counts, and answers 500 where nothing else could.

    Args:
        secure: clients come over TLS.
    """

    def __init__(self, app: ASGIApp, meters: Meters, *, secure: bool = False) -> None:
        self._app = app
        self._meters = meters
        self._headers = _HEADERS | (_SECURE if secure else {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._talk(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = rates.prepare(scope)
        began = time.perf_counter()
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._count(scope, message["status"], time.perf_counter() - began)
                headers = list(message.get("headers", ()))
                headers += [(name.lower().encode(), value.encode()) for name, value in told.items()]
                present = {name.lower() for name, _ in headers}
                message = {**message, "headers": headers + [pair for pair in self._headers.items() if pair[0] not in present]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            _log(error, scope["method"])
            if started:
                # Too late for a status: the server cuts the connection, so that the client does not take a half for the whole.
                raise RuntimeError(f"the answer broke off ({type(error).__name__})") from None
            await internal_error(scope["path"])(scope, receive, send_with_headers)

    async def _talk(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            _log(error, "a WebSocket")
            raise RuntimeError(f"the connection broke off ({type(error).__name__})") from None

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        # The route's template, not the path: that would be a label for each turn.
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if route != "none" else "any"
        self._meters.requests.labels(method, route, str(status)).inc()
        self._meters.seconds.labels(method, route).observe(seconds)


def _log(error: Exception, where: str) -> None:
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("unforeseen %s in %s\n%s", type(error).__name__, where, frames)
