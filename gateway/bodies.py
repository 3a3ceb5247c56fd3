"""Request bodies: bounded while they come in, and JSON read strictly, before any route sees them.

A body over the limit is refused without reading on. What passes is plain JSON that can be written again: UTF-8, no lone surrogates, no
duplicate names, finite numbers, bounded nesting. Whether it fits a route is for the route.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

from fastapi import Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.problems import answer_to, problem
from orchestration.core.errors import BadRequest, Invalid, TooLarge, TurnmillError

#: The deepest nesting of objects and lists that is taken.
MAX_DEPTH = 64

#: Digits of the longest whole number that is taken.
MAX_DIGITS = 100

#: Paths below this read their bodies themselves: a signature covers the bytes.
RAW_PATHS = ("/v1/webhooks/",)

#: The page of a decision link sends a form.
_FORM_PATH = re.compile(r"/v1/approvals/[A-Za-z0-9_-]{1,64}/link")


#: Seconds in which a body must be complete.
READ_S = 60.0


class Disconnected(Exception):
    """The client went away before its body was complete."""


class Bodies:
    """ASGI middleware that reads a request's body, at most `max_bytes` of it in `read_s` seconds, and hands it on whole and checked."""

    def __init__(self, app: ASGIApp, max_bytes: int, read_s: float = READ_S) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._read_s = read_s

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
                strict_json(body)
                if not kind:
                    scope["headers"] = [*_without(scope["headers"], b"content-type"), (b"content-type", b"application/json")]
        except Disconnected:
            return
        except TimeoutError:
            told = f"the body was not complete after {self._read_s:g} s; nothing changed"
            await problem(408, "request_timeout", told, headers={"Connection": "close"}, path=scope["path"])(scope, receive, send)
            return
        except TurnmillError as error:
            await answer_to(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

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


def strict_json(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        BadRequest: it is no JSON, is not UTF-8, is nested too deeply, repeats a name, or has a number that is not finite or far too long.
        Invalid: a text in it has a lone surrogate, so it cannot be stored; says where.
    """
    try:
        value = json.loads(
            body.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_bounded,
            object_pairs_hook=_unique,
        )
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise BadRequest(f"the body is nested deeper than {MAX_DEPTH} levels") from None
    _check_texts(value)
    return value


def json_answer(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`data` as a JSON answer. A lone surrogate in stored text becomes `?`; it must not cost the whole answer."""
    content = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(content, status, headers, media_type="application/json")


def _refuse_constant(name: str) -> Any:
    raise BadRequest(f"the body is not JSON: {name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise BadRequest("the body has a number that is too large")
    return number


def _bounded(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise BadRequest(f"the body has a number of more than {MAX_DIGITS} digits")
    return int(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) != len(pairs):
        # Whoever checks the request before us may take the first of the two, we the last.
        raise BadRequest("the body has an object with the same name twice")
    return named


def _check_texts(value: Any) -> None:
    waiting: list[tuple[Any, tuple[str | int, ...]]] = [(value, ())]
    while waiting:
        found, loc = waiting.pop()
        if isinstance(found, str):
            _check_text(found, loc)
        elif isinstance(found, (dict, list)):
            if len(loc) >= MAX_DEPTH:
                raise BadRequest(f"the body is nested deeper than {MAX_DEPTH} levels")
            parts = found.items() if isinstance(found, dict) else enumerate(found)
            for key, part in parts:
                if isinstance(key, str):
                    _check_text(key, loc)
                if isinstance(part, (str, dict, list)):
                    waiting.append((part, (*loc, key)))


def _check_text(text: str, loc: tuple[str | int, ...]) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        found = {"loc": ["body", *loc], "msg": "a lone surrogate is no character"}
        raise Invalid("the body has a text with a lone surrogate", [found]) from None


def _without(headers: list[tuple[bytes, bytes]], name: bytes) -> list[tuple[bytes, bytes]]:
    return [pair for pair in headers if pair[0].lower() != name]


def _replay(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
