"""What every answer of the gateway has around it: headers for browsers and proxies, and a clean end when something unforeseen fails.

An unforeseen exception is logged by its kind and place alone, since its message may hold what a user sent.
"""

from __future__ import annotations

import logging
import traceback

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.problems import internal_error

log = logging.getLogger(__name__)

_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cache-control": b"no-store",
}


class Envelope:
    """ASGI middleware: adds the headers that an answer does not set itself, and answers 500 where nothing else could."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = list(message.get("headers", ()))
                present = {name.lower() for name, _ in headers}
                message = {**message, "headers": headers + [pair for pair in _HEADERS.items() if pair[0] not in present]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error("unforeseen %s in %s\n%s", type(error).__name__, scope["method"], frames)
            if started:
                # Too late for a status: the server cuts the connection, so that the client does not take a half for the whole.
                raise RuntimeError(f"the answer broke off ({type(error).__name__})") from None
            await internal_error()(scope, receive, send_with_headers)
