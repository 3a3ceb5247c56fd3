"""Agents for programs that speak OpenAI's chat completions: an agent is a model, a completion is a turn.

What a request means is in `openai_requests.py`, what an answer looks like in `openai_answers.py`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, Response
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from gateway.auth import Converses, ReadsTurns
from gateway.bodies import json_answer
from gateway.openai_answers import DONE, FINISH, Completion, Pieces, as_data, failure, why_not
from gateway.openai_requests import ChatBody, asked, digest
from gateway.parts import GatewayParts, Parts
from gateway.problems import documented, problem
from gateway.streams import COMMENT, departure
from gateway.turns import IdempotencyKey, idempotency_key_of, locator, traceparent_of
from orchestration.actions import read
from orchestration.actions.follow import follow_turn, wait_for_end
from orchestration.actions.submit import Submission, submit
from orchestration.core.errors import NotFound, StoreUnavailable, TurnmillError, UnknownAgent
from orchestration.core.ids import is_id
from orchestration.core.turn import StopReason
from orchestration.identity.callers import Caller

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1", tags=["for OpenAI clients"])

#: When these "models" were made, for clients that ask; the agents themselves do not know.
_CREATED = int(time.time())

#: Longest wait of one look for a turn's end, in seconds; then it is looked whether the client is still there.
_LOOK_S = 3600.0

_GOING_AWAY = ("going_away", "this gateway stops; the turn goes on, and GET /v1/turns/{id} tells its end")


@router.get("/models", summary="List the agents as models")
def list_models(_principal: ReadsTurns, parts: GatewayParts) -> Response:
    """All agents, in the shape of OpenAI's models."""
    return json_answer({"object": "list", "data": [_model(name) for name in sorted(parts.ports.project.agents)]})


@router.get("/models/{model}", summary="Read an agent as a model")
def get_model(model: str, _principal: ReadsTurns, parts: GatewayParts) -> Response:
    """One agent, in the shape of OpenAI's models."""
    return json_answer(_model(_known(parts, model)))


@router.post(
    "/chat/completions",
    status_code=200,
    summary="Ask an agent for a completion",
    response_class=Response,
    responses={
        200: {
            "description": "the completion, or its pieces as server-sent events",
            "content": {"application/json": {}, "text/event-stream": {}},
        },
        **documented(409),
    },
)
async def complete(
    body: ChatBody,
    caller: Converses,
    parts: GatewayParts,
    turnmill_conversation: Annotated[str | None, Header(description="the conversation that is kept")] = None,
    idempotency_key: IdempotencyKey = None,
    traceparent: Annotated[str | None, Header()] = None,
) -> Response:
    """The agent's answer to the last user message, as one completion or as a stream that stays open until the turn ends."""
    agent = _known(parts, body.model)
    wanted = asked(body, turnmill_conversation)
    submission = Submission(
        agent=agent,
        input=wanted.input,
        principal=caller.principal,
        conversation_id=wanted.conversation_id,
        brief=wanted.brief,
        metadata=body.metadata or {},
        idempotency_key=idempotency_key_of(idempotency_key),
        idempotency_digest=digest(body, wanted.conversation_id),
        traceparent=traceparent_of(traceparent),
        history=wanted.history,
        token=caller.token,
        token_ends_s=caller.expires_at or 0.0,
    )
    submitted = await run_in_threadpool(submit, parts.ports, submission)
    completion = Completion(submitted.turn_id, submitted.conversation_id, agent, int(time.time()))
    if body.stream:
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        return _Stream(parts, caller, completion, with_usage=with_usage)
    return _Whole(parts, caller, completion)


def _known(parts: Parts, model: str) -> str:
    if not is_id(model) or model not in parts.ports.project.agents:
        raise UnknownAgent("there is no such agent; GET /v1/models lists them")
    return model


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": _CREATED, "owned_by": "turnmill"}


class _Answer(Response):
    """What both forms of an answer share: a turn to follow, and a client that may go meanwhile, which ends nothing."""

    def __init__(self, parts: Parts, caller: Caller, completion: Completion) -> None:
        self._named = {"Turnmill-Turn": completion.turn_id, "Turnmill-Conversation": completion.conversation_id}
        super().__init__(b"", 200, dict(self._named))
        self._parts = parts
        self._tenant = caller.principal.tenant
        self._completion = completion
        self._locate = locator(parts, caller.principal, completion.turn_id)
        self._scope: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        answering = asyncio.create_task(self.answer(receive, send))
        leaving = asyncio.create_task(departure(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def answer(self, receive: Receive, send: Send) -> None:
        """Follow the turn and write the answer."""
        raise NotImplementedError


class _Whole(_Answer):
    """One completion, when the turn has ended."""

    async def answer(self, receive: Receive, send: Send) -> None:
        """Wait for the turn's end, however long that takes, and write it."""
        await (await self._made())(self._scope, receive, send)

    async def _made(self) -> Response:
        completion, hub = self._completion, self._parts.hub
        while not await wait_for_end(hub, self._tenant, completion.turn_id, self._locate, _LOOK_S):
            if hub.stopping:
                return self._refused(503, *_GOING_AWAY)
            await asyncio.sleep(0.5)  # the store was away, or the turn is gone
            try:
                await self._locate()
            except NotFound:
                break
            except StoreUnavailable:
                continue
        try:
            turn = await run_in_threadpool(read.turn, self._parts.ports, self._tenant, completion.turn_id)
        except TurnmillError as error:
            return self._refused(404, error.code, str(error))
        if turn["stop_reason"] in FINISH or turn["answer"]:
            return json_answer(completion.whole(turn), 200, self._named)
        return self._refused(500 if turn["stop_reason"] == StopReason.ERROR else 409, *why_not(turn))

    def _refused(self, status: int, code: str, detail: str) -> Response:
        answer = problem(status, code, detail, headers=self._named, path=self._scope["path"])
        # Their clients ask again by themselves, and would make another turn.
        answer.headers["x-should-retry"] = "false"
        return answer


class _Stream(_Answer):
    """The pieces of a completion, as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, parts: Parts, caller: Caller, completion: Completion, *, with_usage: bool) -> None:
        super().__init__(parts, caller, completion)
        self._pieces = Pieces(completion, with_usage=with_usage)
        self.headers["cache-control"] = "no-cache, no-transform"
        self.headers["x-accel-buffering"] = "no"
        del self.headers["content-length"]

    async def answer(self, receive: Receive, send: Send) -> None:
        """Write the answer as it comes, to the turn's end."""
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._write(send, as_data(self._pieces.first()))
            async with aclosing(self._all()) as pieces:
                async for piece in pieces:
                    await self._write(send, COMMENT if piece is None else as_data(piece))
            await self._write(send, DONE)
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            self._parts.meters.cut_off.inc()
            log.info("a client that does not read its completion was cut off")
        except OSError:
            log.debug("a client of a completion went away")

    async def _all(self) -> AsyncGenerator[dict[str, Any] | None, None]:
        """The pieces. Unlike a stream of frames this one cannot be resumed by its client, so it is resumed here."""
        after: int | None = None
        while not self._pieces.complete:
            try:
                frames = await follow_turn(
                    self._parts.hub, self._tenant, self._completion.turn_id, self._locate, after, idle_s=self._parts.pace.comment_s
                )
                before = after
                if frames is not None:
                    async with aclosing(frames):
                        async for ready in frames:
                            if ready is None:
                                yield None
                            elif ready.seq:  # else it fell behind, or frames are gone: what is left comes from the store
                                after = ready.seq
                                for piece in self._pieces.of(json.loads(ready.text)):
                                    yield piece
                if not self._pieces.complete and before == after:
                    turn = await run_in_threadpool(read.turn, self._parts.ports, self._tenant, self._completion.turn_id)
                    if turn["ended_at"] is not None:  # its frames are no longer kept
                        for piece in self._pieces.at_end(turn):
                            yield piece
            except StoreUnavailable:
                yield None
            except TurnmillError as error:
                yield failure(error.code, str(error))
                return
            if self._parts.hub.stopping and not self._pieces.complete:
                yield failure(*_GOING_AWAY)
                return
            await asyncio.sleep(0 if self._pieces.complete else 0.2)

    async def _write(self, send: Send, body: bytes) -> None:
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})

    async def _send(self, send: Send, message: dict[str, object]) -> None:
        async with asyncio.timeout(self._parts.pace.send_s):
            await send(message)
