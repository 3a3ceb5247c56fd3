"""Decision links: making one, and the page that it opens in a browser, which shows the call and asks yes or no. Opening it decides nothing.

The link is a query parameter, which our logs never hold; who has it needs no token.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from html import escape
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool

from gateway.approvals import DecisionBody
from gateway.auth import admitted
from gateway.bodies import json_answer
from gateway.parts import GatewayParts, Parts, known_id
from gateway.problems import documented, status_of, validation_errors
from orchestration.actions.link import MAX_CHARS, MAX_S, Link, decide_by_link, make_link, open_link
from orchestration.core.approval import ApprovalState, as_api
from orchestration.core.errors import AlreadyDecided, Invalid, TurnmillError
from orchestration.core.principal import Scope

router = APIRouter(prefix="/v1/approvals", tags=["approvals"])

#: Characters of the arguments that the page shows; a call with more of them is not to be decided from there.
MAX_SHOWN_CHARS = 100_000

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:3rem auto;padding:0 1rem;color:#1a1a1a}"
    "pre{background:#f4f4f4;padding:1rem;overflow:auto;white-space:pre-wrap;word-break:break-word}"
    "dt{font-weight:600}dd{margin:0 0 .5rem}textarea{width:100%;font:inherit}"
    "button{font:inherit;padding:.5rem 1.5rem;margin:.5rem .5rem 0 0}"
)

_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

_POLICY = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

#: What cannot be done with a link is told on a page as well.
_PAGES = documented(400, 401, 403, 404, 409, 410, 422, 429, 500, 503, also="text/html")

Wanted = TypeVar("Wanted", bound=BaseModel)

LinkToken = Annotated[str, Query(min_length=1, max_length=MAX_CHARS, description="from the URL that was given out")]


class LinkBody(BaseModel):
    """What makes a link. `sub` names for whom it decides, which needs the scope `admin` where that is somebody else."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    sub: str | None = Field(None, min_length=1, max_length=200)
    timeout_s: float | None = Field(None, gt=0, le=MAX_S, allow_inf_nan=False, description="seconds for which it is good; a day by default")


class LinkMade(BaseModel):
    """A link: good for one decision, until `expires_at`."""

    url: str
    expires_at: str | None


async def _raw(request: Request) -> bytes:
    return await request.body()


@router.get(
    "/{approval_id}/link",
    summary="Open a decision link",
    response_class=Response,
    responses={200: {"content": {"text/html": {}}}, **_PAGES},
)
def open_page(approval_id: str, link: LinkToken, parts: GatewayParts) -> Response:
    """The page of a link: the call, and a form that decides. Nothing is decided by opening it, however often."""
    return _page_or_error(lambda: _asking_page(open_link(parts.ports, known_id(approval_id, "approval"), link)))


@router.post(
    "/{approval_id}/link",
    summary="Make a decision link, or decide with one",
    responses={200: {"model": LinkMade, "content": {"text/html": {}}}, **_PAGES},
    openapi_extra={"requestBody": {"content": {"application/json": {"schema": LinkBody.model_json_schema()}}}},
)
async def post_link(
    approval_id: str,
    request: Request,
    parts: GatewayParts,
    body: Annotated[bytes, Depends(_raw)],
    link: Annotated[LinkToken | None, Query()] = None,
) -> Response:
    """Without `link`: a URL with which the principal can decide this approval once, in a browser. With it: the decision."""
    known_id(approval_id, "approval")
    if link is None:
        return await run_in_threadpool(_make, parts, request, approval_id, body)
    return await run_in_threadpool(_decide, parts, request, approval_id, link, body)


def _make(parts: Parts, request: Request, approval_id: str, body: bytes) -> Response:
    principal = admitted(parts, request, Scope.APPROVALS_DECIDE).principal
    wanted = _read(LinkBody, body)
    token, expires_at = make_link(
        parts.ports, principal, approval_id, sub=wanted.sub, timeout_s=wanted.timeout_s, source=parts.proxies.from_where("rest", request)
    )
    base = parts.proxies.urls(request)[0].partition("?")[0]
    return json_answer({"url": f"{base}?link={token}", "expires_at": expires_at})


def _decide(parts: Parts, request: Request, approval_id: str, token: str, body: bytes) -> Response:
    if not _is_form(request):
        wanted = _read(DecisionBody, body)
        if wanted.arguments is not None:
            raise Invalid("a link decides the call as it is", [{"loc": ["body", "arguments"], "msg": "not taken with a link"}])
        return json_answer(
            decide_by_link(parts.ports, approval_id, token, wanted.approved, wanted.note or "", parts.proxies.from_where("link", request))
        )

    def decided() -> Response:
        try:
            form = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=10)
        except ValueError:
            form = {}
        answer = form.get("approved", [""])[-1]
        if answer not in ("true", "false"):
            raise Invalid("the form does not say yes or no", [{"loc": ["body", "approved"], "msg": "true or false"}])
        note = form.get("note", [""])[-1][:10_000]
        settled = decide_by_link(parts.ports, approval_id, token, answer == "true", note, parts.proxies.from_where("link", request))
        return _page(_settled_text(settled), "<p>You can close this page.</p>")

    return _page_or_error(decided)


def _is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/x-www-form-urlencoded"


def _read(kind: type[Wanted], body: bytes) -> Wanted:
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        found = [
            one | {"loc": ("body", *one["loc"])} for one in error.errors(include_input=False, include_url=False, include_context=False)
        ]
        raise Invalid("the body does not fit", validation_errors(found)) from None


def _page_or_error(make: Callable[[], Response]) -> Response:
    """A page in any case: who opens a link has a browser, and reads no JSON."""
    try:
        return make()
    except AlreadyDecided as error:
        return _page(_settled_text(error.approval), f"<p>{escape(str(error))}</p>", 409)
    except TurnmillError as error:
        status = status_of(type(error))
        return _page(
            "This cannot be decided here", f"<p>{escape(str(error))}</p>" if status < 500 else "<p>Please try again later.</p>", status
        )


def _asking_page(link: Link) -> Response:
    approval = link.approval
    if approval.state is not ApprovalState.PENDING:
        return _page(_settled_text(as_api(approval)), _facts(link))
    arguments = json.dumps(approval.arguments, ensure_ascii=False, indent=2)
    if len(arguments) > MAX_SHOWN_CHARS:
        return _page("This call is too long to be decided here", _facts(link))
    form = (
        '<form method="post"><p><label>Note, which the agent reads after a no<br>'
        '<textarea name="note" rows="3" maxlength="10000"></textarea></label></p>'
        '<button name="approved" value="true">Approve</button><button name="approved" value="false">Deny</button></form>'
    )
    return _page(f"May {approval.prefix} run?", f"{_facts(link)}<p>Arguments</p><pre>{escape(arguments)}</pre>{form}")


def _facts(link: Link) -> str:
    shown = as_api(link.approval)
    facts: list[tuple[str, Any]] = [
        ("Tool", shown["prefix"]),
        ("Why a human is asked", shown["reason"] or "the tool's owner or the agent wants it"),
        ("Agent", shown["agent"]),
        ("Asked by", shown["submitted_by"]),
        ("Conversation", shown["conversation_id"]),
        ("Expires", shown["expires_at"] or "never"),
        ("You decide as", link.principal.sub),
    ]
    if shown["quorum"] > 1:
        facts.append(("Approvals needed", f"{shown['quorum']}, so far {sum(one['approved'] for one in shown['decisions'])}"))
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>' for name, value in facts)}</dl>"


def _settled_text(approval: dict[str, Any]) -> str:
    if approval["state"] == "pending":
        return f"Your answer about {approval['prefix']} is recorded; others are asked too"
    by = f" by {approval['decided_by']}" if approval["decided_by"] else ""
    return f"{approval['prefix']}: {approval['state']}{by}"


def _page(title: str, content: str, status: int = 200) -> Response:
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta name="robots" content="noindex"><title>{escape(title)}</title><style>{_STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1>{content}</body></html>"
    )
    return Response(text, status, {"Content-Security-Policy": _POLICY, "Cache-Control": "no-store"}, media_type="text/html")
