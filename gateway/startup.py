"""The gateway's beginning as its operator sees it: one clear line where a setting is wrong, no secret in the server's own log lines, and
WebSockets that are pinged as documented however the server was started."""

from __future__ import annotations

import logging
import sys
from typing import NoReturn

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestration.core.errors import TurnmillError


class ClearStart:
    """ASGI middleware: a start that fails for a known reason is told to the server in one line instead of a traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        failed = False

        async def held_back(message: Message) -> None:
            # The framework's own message is the whole traceback; what is told instead is known only when the error arrives here.
            nonlocal failed
            failed = failed or message["type"] == "lifespan.startup.failed"
            if not failed:
                await send(message)

        try:
            await self._app(scope, receive, held_back)
        except TurnmillError as error:
            if not failed:
                raise
            await send({"type": "lifespan.startup.failed", "message": f"turnmill: {error}"})
        except BaseException as error:
            if failed:
                await send(
                    {"type": "lifespan.startup.failed", "message": f"turnmill: the gateway did not start: {type(error).__name__}: {error}"}
                )
            raise


def refuse_to_start(error: TurnmillError) -> NoReturn:
    """End the process with one line on standard error; raises SystemExit."""
    print(f"turnmill: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)


class _HideQueries(logging.Filter):
    """Cuts the query off the paths in a server's log lines: a client may have put a token there, rightly (a ticket) or wrongly."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                f"{arg.partition('?')[0]}?…" if isinstance(arg, str) and arg.startswith("/") and "?" in arg else arg for arg in record.args
            )
        return True


_HIDE_QUERIES = _HideQueries()


def keep_queries_out_of_logs() -> None:
    """Cut the query off the paths that uvicorn logs. More than once does no harm."""
    for name in ("uvicorn.access", "uvicorn.error"):
        logging.getLogger(name).addFilter(_HIDE_QUERIES)
