"""Routes of conversations: read one, its history, follow its frames, delete it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from starlette.concurrency import run_in_threadpool

from gateway.auth import ReadsTurns, WatchesTurns, WritesTurns
from gateway.bodies import json_answer
from gateway.parts import GatewayParts, known_id
from gateway.problems import documented
from gateway.shapes import Conversation, History
from gateway.streams import EventStream
from orchestration.actions import read
from orchestration.actions.follow import event_id, follow_conversation

router = APIRouter(prefix="/v1/conversations/{conversation_id}", tags=["conversations"])


@router.get("", summary="Read a conversation", response_model=Conversation)
def get_conversation(conversation_id: str, principal: ReadsTurns, parts: GatewayParts) -> Response:
    """The conversation: its agent, and what runs and waits in it."""
    return json_answer(read.conversation(parts.ports, principal.tenant, known_id(conversation_id, "conversation")))


@router.delete("", status_code=204, summary="Delete a conversation", responses=documented(409))
def delete_conversation(conversation_id: str, principal: WritesTurns, parts: GatewayParts) -> Response:
    """Forget the conversation and its turns."""
    read.delete_conversation(parts.ports, principal.tenant, known_id(conversation_id, "conversation"))
    return Response(status_code=204)


@router.get("/history", summary="Read the history", response_model=History)
def get_history(
    conversation_id: str,
    principal: ReadsTurns,
    parts: GatewayParts,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    before: Annotated[int | None, Query(ge=0, le=2**53, description="only entries before the one with this `n`")] = None,
) -> Response:
    """The newest `limit` entries, oldest first."""
    known_id(conversation_id, "conversation")
    return json_answer({"history": read.history(parts.ports, principal.tenant, conversation_id, limit, before)})


@router.get("/frames", status_code=200, summary="Follow a conversation", response_class=EventStream)
async def conversation_frames(
    conversation_id: str, caller: WatchesTurns, parts: GatewayParts, last_event_id: Annotated[str | None, Header()] = None
) -> Response:
    """The frames of all turns of the conversation as server-sent events, those kept or those after `Last-Event-ID`, and then live."""
    known_id(conversation_id, "conversation")
    after = event_id(last_event_id)

    tenant = caller.principal.tenant

    async def still_there() -> object:
        return await run_in_threadpool(read.conversation, parts.ports, tenant, conversation_id)

    frames = await follow_conversation(parts.hub, tenant, conversation_id, still_there, after, idle_s=parts.pace.comment_s)
    return EventStream(frames, parts, caller)
