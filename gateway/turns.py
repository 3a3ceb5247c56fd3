"""Routes of turns: submit, read, cancel, follow. A walk through a turn begins here."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request, Response
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from starlette.concurrency import run_in_threadpool

from gateway.auth import ReadsTurns, SubmitsTurns, WatchesTurns, WritesTurns
from gateway.bodies import json_answer
from gateway.parts import GatewayParts, Parts, known_id
from gateway.problems import documented
from gateway.shapes import Accepted, Turn
from gateway.streams import EventStream
from orchestration.actions import cancel, read
from orchestration.actions.follow import event_id, follow_turn, wait_for_end
from orchestration.actions.submit import Submission, Submitted, submit
from orchestration.core.errors import Invalid, UnknownAgent
from orchestration.core.ids import ID_PATTERN, is_id
from orchestration.core.principal import Principal
from orchestration.core.turn import OnBusy

router = APIRouter(prefix="/v1", tags=["turns"])

#: The longest wait that `Prefer: wait=N` gets, in seconds.
MAX_WAIT_S = 60

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_WAIT = re.compile(r"(?:^|[,;])\s*wait\s*=\s*\"?([0-9]{1,9})\"?\s*(?:[,;]|$)", re.IGNORECASE)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class TextPart(_Strict):
    """Text of the input."""

    type: Literal["text"]
    text: str


class ImageUrl(_Strict):
    """Where an image is: an http(s) URL or a data URL."""

    url: str = Field(min_length=1, pattern=r"^(https?://|data:image/)")
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(_Strict):
    """An image of the input."""

    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]

#: Text, or content parts; which of the two was meant is seen first, so that an error speaks of that one alone.
Input = Annotated[
    Annotated[str, Field(min_length=1), Tag("text")] | Annotated[list[ContentPart], Field(min_length=1, max_length=1000), Tag("parts")],
    Discriminator(
        lambda value: "text" if isinstance(value, str) else "parts" if isinstance(value, list) else None,
        custom_error_type="input_type",
        custom_error_message="text or a list of content parts was expected",
    ),
]


class TurnBody(_Strict):
    """What `POST /v1/agents/{agent}/turns` takes."""

    input: Input
    conversation_id: str | None = Field(None, pattern=ID_PATTERN)
    brief: str = ""
    tools: list[dict[str, Any]] = Field(default_factory=list, max_length=128)
    metadata: dict[str, Any] = Field(default_factory=dict)
    callback_url: str | None = Field(None, max_length=2048, pattern=r"^https?://[^\s/]+")
    on_busy: Literal["queue", "reject", "interrupt", "steer"] = "queue"
    deadline_s: float | None = Field(None, gt=0, le=31_622_400, allow_inf_nan=False)
    model: str | None = Field(None, max_length=200)


#: A route's parameter: the key under which a submission counts once; `idempotency_key_of` reads it.
IdempotencyKey = Annotated[
    str | None,
    Header(
        description="the same key with the same body gives the same turn for 24 h",
        json_schema_extra={"minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"},
    ),
]


@router.post(
    "/agents/{agent}/turns",
    status_code=202,
    summary="Submit a turn",
    response_model=Accepted,
    responses={200: {"description": "the turn, which ended within the wait that was asked for", "model": Turn}, **documented(409)},
)
async def submit_turn(
    agent: str,
    body: TurnBody,
    caller: SubmitsTurns,
    parts: GatewayParts,
    idempotency_key: IdempotencyKey = None,
    prefer: Annotated[str | None, Header(description="wait=N: answer with the ended turn if it ends within N seconds")] = None,
    traceparent: Annotated[str | None, Header()] = None,
) -> Response:
    """Store a user's input as a turn of a conversation; 202 says that it is stored and will be worked through."""
    if not is_id(agent):
        raise UnknownAgent("there is no such agent")
    principal = caller.principal
    submission = Submission(
        agent=agent,
        input=body.input if isinstance(body.input, str) else [part.model_dump(exclude_none=True) for part in body.input],
        principal=principal,
        conversation_id=body.conversation_id,
        brief=body.brief,
        tools=body.tools,
        metadata=body.metadata,
        callback_url=body.callback_url or "",
        on_busy=OnBusy(body.on_busy),
        deadline_s=body.deadline_s,
        model=body.model or "",
        idempotency_key=idempotency_key_of(idempotency_key),
        traceparent=traceparent_of(traceparent),
        token=caller.token,
        token_ends_s=caller.expires_at or 0.0,
    )
    submitted = await run_in_threadpool(submit, parts.ports, submission)
    wait_s = _wanted_wait_s(prefer)
    if wait_s and await wait_for_end(parts.hub, principal.tenant, submitted.turn_id, locator(parts, principal, submitted.turn_id), wait_s):
        ended = await run_in_threadpool(read.turn, parts.ports, principal.tenant, submitted.turn_id)
        return json_answer(ended, headers={"Preference-Applied": f"wait={wait_s}"})
    return accepted(submitted)


@router.get("/turns/{turn_id}", summary="Read a turn", response_model=Turn)
def get_turn(turn_id: str, principal: ReadsTurns, parts: GatewayParts) -> Response:
    """The turn with its state, its answer and its tool calls."""
    return json_answer(read.turn(parts.ports, principal.tenant, known_id(turn_id, "turn")))


@router.post("/turns/{turn_id}/cancel", summary="Cancel a turn", response_model=Turn, responses=documented(409))
def cancel_turn(turn_id: str, request: Request, principal: WritesTurns, parts: GatewayParts) -> Response:
    """End the turn: its waiting approvals are cancelled, its running steps stop at the next safe point."""
    source = parts.proxies.from_where("rest", request)
    return json_answer(cancel.cancel_turn(parts.ports, principal, known_id(turn_id, "turn"), source))


@router.post("/turns/{turn_id}/calls/{call_id}/cancel", summary="Cancel a tool call", response_model=Turn, responses=documented(409))
def cancel_call(turn_id: str, call_id: str, request: Request, principal: WritesTurns, parts: GatewayParts) -> Response:
    """Cancel one tool call; the model reads that it was cancelled, and the turn goes on."""
    call_id, source = known_id(call_id, "call"), parts.proxies.from_where("rest", request)
    return json_answer(cancel.cancel_call(parts.ports, principal, known_id(turn_id, "turn"), call_id, source))


@router.get(
    "/turns/{turn_id}/frames",
    status_code=200,
    summary="Follow a turn",
    response_class=EventStream,
    responses={204: {"description": "the turn has ended and its last frame was seen"}},
)
async def turn_frames(
    turn_id: str, caller: WatchesTurns, parts: GatewayParts, last_event_id: Annotated[str | None, Header()] = None
) -> Response:
    """The turn's frames as server-sent events, from the first or after `Last-Event-ID`; they end after `done`."""
    known_id(turn_id, "turn")
    after = event_id(last_event_id)
    located = locator(parts, caller.principal, turn_id)
    frames = await follow_turn(parts.hub, caller.principal.tenant, turn_id, located, after, idle_s=parts.pace.comment_s)
    return Response(status_code=204) if frames is None else EventStream(frames, parts, caller)


def accepted(submitted: Submitted, status: int = 202) -> Response:
    """The answer that says where a stored turn is."""
    answer = {
        "turn_id": submitted.turn_id,
        "conversation_id": submitted.conversation_id,
        "state": submitted.state,
        "position": submitted.position,
    }
    return json_answer(answer, status, {"Location": f"/v1/turns/{submitted.turn_id}"})


def traceparent_of(header: str | None) -> str:
    """The W3C traceparent in a header; empty when it has none that can be gone on with."""
    return header if header and _TRACEPARENT.fullmatch(header) else ""


def locator(parts: Parts, principal: Principal, turn_id: str) -> Callable[[], Awaitable[read.TurnPlace]]:
    """What tells where the frames of a turn are, at each call anew; see `follow_turn`."""

    async def locate() -> read.TurnPlace:
        return await run_in_threadpool(read.turn_place, parts.ports, principal.tenant, turn_id)

    return locate


def idempotency_key_of(header: str | None) -> str | None:
    """The key in an `Idempotency-Key` header; None without one. Raises Invalid for one that is too long or unprintable."""
    if header is None:
        return None
    if not 1 <= len(header) <= 255 or not header.isascii() or not header.isprintable():
        raise Invalid(
            "the Idempotency-Key does not fit", [{"loc": ["header", "Idempotency-Key"], "msg": "1 to 255 printable ASCII characters"}]
        )
    return header


def _wanted_wait_s(prefer: str | None) -> int:
    found = _WAIT.search(prefer or "")
    return min(int(found.group(1)), MAX_WAIT_S) if found else 0
