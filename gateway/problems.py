"""Errors as problem+json (RFC 9457): one table from the error tree to HTTP statuses, and one form for everything else that can go wrong.

An answer carries a stable `code` and says where the fault is; it never carries back what was sent.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from orchestration.core import errors

log = logging.getLogger(__name__)

#: The status of each kind of error; a kind that is not here has the status of its nearest ancestor.
STATUSES: dict[type[errors.TurnmillError], int] = {
    errors.TurnmillError: 500,
    errors.Invalid: 422,
    errors.BadRequest: 400,
    errors.BadEventId: 400,
    errors.NotFound: 404,
    errors.Unauthorized: 401,
    errors.Forbidden: 403,
    errors.TooLarge: 413,
    errors.RateLimited: 429,
    errors.StoreUnavailable: 503,
    errors.ConversationBusy: 409,
    errors.IdempotencyMismatch: 409,
    errors.TurnEnded: 409,
    errors.CallEnded: 409,
    errors.AlreadyDecided: 409,
    errors.ApprovalExpired: 410,
    errors.ApprovalCancelled: 410,
    errors.ArgumentsDiffer: 409,
    errors.NotHeld: 409,
}

#: Codes of what only HTTP knows.
_HTTP_CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed", 413: "too_large", 415: "unsupported_media_type"}

#: Messages of pydantic that would repeat what was sent.
_SAFE_MESSAGES = {"union_tag_invalid": "the type is none of those that are taken here"}

_UNFORESEEN = "something failed on our side; whether the request took effect is not known"

#: Errors of one request that an answer lists, and characters of one place in it.
MAX_ERRORS, MAX_LOC_CHARS = 50, 64

_SCHEMA = {
    "type": "object",
    "required": ["type", "title", "status", "code"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {"type": "object", "properties": {"loc": {"type": "array", "items": {}}, "msg": {"type": "string"}}},
        },
    },
}

#: Paths below these are for OpenAI's clients, which look for an `error` object in what is no success.
OPENAI_PATHS = ("/v1/chat/", "/v1/models")

#: Types of error, as OpenAI names them, by status.
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def documented(*statuses: int, also: str = "") -> dict[int | str, dict[str, Any]]:
    """What the OpenAPI document says about answers with these statuses; `also` is another media type that they may have."""
    content: dict[str, Any] = {"application/problem+json": {"schema": _SCHEMA}} | ({also: {}} if also else {})
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


#: What the OpenAPI document says about every route.
DOCUMENTED = documented(400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503)


def problem(status: int, code: str, detail: str, *, headers: dict[str, str] | None = None, path: str = "", **more: Any) -> Response:
    """One answer in the problem+json form; `more` becomes members of its own. `path` is the request's: some clients want more."""
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail, "code": code, **more}
    if path.startswith(OPENAI_PATHS):
        kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        body["error"] = {"message": detail, "type": kind, "param": None, "code": code}
        # Their clients ask again by themselves after a fault of ours; a turn that was stored would become two.
        headers = {**(headers or {}), "x-should-retry": "true" if status in (429, 503) else "false"}
    content = json.dumps(body, ensure_ascii=False, default=str).encode("utf-8", "replace")
    return Response(content, status, headers, media_type="application/problem+json")


def status_of(kind: type[BaseException]) -> int:
    """The status of an error's class: its own or its nearest ancestor's."""
    for ancestor in kind.__mro__:
        if ancestor in STATUSES:
            return STATUSES[ancestor]
    return 500


def told(error: errors.TurnmillError) -> dict[str, Any]:
    """What is told of an error: its code, its text, and what its kind has beside. What is our own fault says nothing of itself."""
    if status_of(type(error)) >= 500 and not isinstance(error, errors.StoreUnavailable):
        log.error("a %s reached the gateway", type(error).__name__)
        return {"code": "internal_error", "detail": _UNFORESEEN}
    more: dict[str, Any] = {}
    if isinstance(error, errors.Invalid):
        more["errors"] = [{"loc": _loc(found.get("loc", ())), "msg": found.get("msg", "")} for found in error.errors[:MAX_ERRORS]]
    if isinstance(error, errors.AlreadyDecided):
        more["approval"] = error.approval
    return {"code": error.code, "detail": str(error), **more}


def answer_to(error: errors.TurnmillError, path: str = "") -> Response:
    """The answer to an error of the domain; `path` is the request's, see `problem`."""
    status = status_of(type(error))
    headers: dict[str, str] = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, (errors.RateLimited, errors.StoreUnavailable)):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, errors.TooLarge):
        # What follows of the body is not read, so the connection cannot be used again.
        headers["Connection"] = "close"
    return problem(status, **told(error), headers=headers, path=path)


def internal_error(path: str = "") -> Response:
    """The answer to what nobody foresaw."""
    return problem(500, "internal_error", _UNFORESEEN, path=path)


def validation_errors(found: Sequence[Any]) -> list[dict[str, Any]]:
    """Pydantic's errors as `{loc, msg}`, without what was sent."""
    return [{"loc": _loc(one["loc"]), "msg": _SAFE_MESSAGES.get(one["type"], one["msg"])} for one in found[:MAX_ERRORS]]


def install(app: FastAPI) -> None:
    """Answer every error of `app` in this form."""

    async def domain(request: Request, error: Exception) -> Response:
        assert isinstance(error, errors.TurnmillError)
        return answer_to(error, request.url.path)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = validation_errors(error.errors())
        where = ", ".join(".".join(str(part) for part in one["loc"]) for one in found[:5])
        return problem(422, "validation_error", f"the request does not fit at: {where}", path=request.url.path, errors=found)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = error.status_code
        detail = "there is no such route" if status == 404 else HTTPStatus(status).phrase
        headers = dict(error.headers or {}) | ({"Allow": _allowed(request)} if status == 405 else {})
        return problem(status, _HTTP_CODES.get(status, "error"), detail, headers=headers, path=request.url.path)

    app.add_exception_handler(errors.TurnmillError, domain)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _allowed(request: Request) -> str:
    """The methods of a path, of all its routes; the framework names those of the first."""
    taken = [
        method
        for method in ("DELETE", "GET", "PATCH", "POST", "PUT")
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]
    return ", ".join(taken)


def _loc(parts: Sequence[Any]) -> list[str | int]:
    # A place may be named by a key that the client chose, of any length.
    return [part if isinstance(part, int) else str(part)[:MAX_LOC_CHARS] for part in parts]
