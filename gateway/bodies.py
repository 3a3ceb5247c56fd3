"""Request bodies: bounded while they come in, and JSON read strictly (`plain_json.py`), before any route sees them.

A body over the limit is refused without keeping more of it. Whether it fits a route is for the route.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.plain_json import strict_json
from gateway.problems import answer_to, problem
from orchestration.core.errors import TooLarge, TurnmillError

#: Longer bodies are read in threads, few at a time, in bytes: others must not wait for them.
LONG_BYTES, LONG_AT_ONCE = 16_384, 2

#: Paths below this read their bodies themselves: a signature covers the bytes.
RAW_PATHS = ("/v1/webhooks/",)

#: The page of a decision link sends a form.
_FORM_PATH = re.compile(r"/v1/approvals/[A-Za-z0-9_-]{1,64}/link")


#: Seconds in which a body must be complete.
READ_S = 60.0

#: How much of a refused body is read and thrown away once the refusal is written: bytes, seconds together, seconds of silence. A connection
#: that is closed while its client still sends is reset, and with it may go the refusal.
SPILL_BYTES, SPILL_S, SPILL_IDLE_S = 8_388_608, 5.0, 1.0


class Disconnected(Exception):
    """The client went away before its body was complete."""


class Bodies:
    """ASGI middleware that reads a request's body, at most `max_bytes` of it in `read_s` seconds, and hands it on whole and checked."""

    def __init__(self, app: ASGIApp, max_bytes: int, read_s: float = READ_S) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._read_s = read_s
        self._long: CapacityLimiter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            async with asyncio.timeout(self._read_s):
                body = await self._read(headers, receive)
            if body and not scope["path"].startswith(RAW_PATHS):
                kind = headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind == "application/x-www-form-urlencoded" and _FORM_PATH.fullmatch(scope["path"]):
                    await self._app(scope, _replay(body, receive), send)
                    return
                if kind and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
                    refusal = problem(415, "unsupported_media_type", "the body is taken as application/json only", path=scope["path"])
                    await refusal(scope, receive, send)
                    return
                await self._check(body)
                if not kind:
                    scope["headers"] = [*_without(scope["headers"], b"content-type"), (b"content-type", b"application/json")]
        except Disconnected:
            return
        except TimeoutError:
            told = f"the body was not complete after {self._read_s:g} s; nothing changed"
            await problem(408, "request_timeout", told, headers={"Connection": "close"}, path=scope["path"])(scope, receive, send)
            return
        except TooLarge as error:
            await _refuse_unread(answer_to(error, scope["path"]), scope, receive, send)
            return
        except TurnmillError as error:
            await answer_to(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _check(self, body: bytes) -> None:
        if len(body) <= LONG_BYTES:
            strict_json(body)
            return
        if self._long is None:  # made in the loop that serves
            self._long = CapacityLimiter(LONG_AT_ONCE)
        await to_thread.run_sync(strict_json, body, limiter=self._long)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        refused = TooLarge(f"a request body may have {self._max_bytes} bytes; nothing changed")
        announced = headers.get("content-length", "")
        if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > self._max_bytes):
            raise refused
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise Disconnected
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self._max_bytes:
                raise refused
            if chunk:
                chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)


async def _refuse_unread(answer: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Write the whole answer, then let what the client is sending run out for a while, and only then end it."""

    async def held_open(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    await answer(scope, receive, held_open)
    spilled = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(SPILL_S):
            while spilled < SPILL_BYTES:
                async with asyncio.timeout(SPILL_IDLE_S):
                    message = await receive()
                spilled += len(message.get("body", b""))
                if not message.get("more_body", False):
                    break
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_answer(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`data` as a JSON answer. A lone surrogate in stored text becomes `?`; it must not cost the whole answer."""
    content = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(content, status, headers, media_type="application/json")


def _without(headers: list[tuple[bytes, bytes]], name: bytes) -> list[tuple[bytes, bytes]]:
    return [pair for pair in headers if pair[0].lower() != name]


def _replay(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
