"""Frames as server-sent events: one event per frame, a comment line in silence, and an end for clients that do not read.

Which frames, and when they end, is for `orchestration/actions/follow.py`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import lru_cache

from fastapi import Response
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from gateway.parts import Parts
from orchestration.actions.follow import Frames
from orchestration.core.errors import StoreUnavailable
from orchestration.core.frames import FrameKind
from orchestration.identity.callers import Caller
from orchestration.state.watcher import Frame

log = logging.getLogger(__name__)

#: Seconds after which a stream without a frame begins with a comment, so that every proxy on the way hands on its beginning.
FIRST_BYTE_S = 0.2

#: Frames that are there at once are sent at once, in pieces of about this size.
PIECE_BYTES = 65_536

#: What keeps proxies awake.
COMMENT = b": still here\n\n"

_LINE_END = re.compile(r"\r\n|\r|\n")

#: Characters that the event stream format does not end lines at, but many a client's line reader does; in JSON they may be escaped.
_OTHER_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


@lru_cache(maxsize=16)
def as_event(ready: Frame | None) -> bytes:
    """One frame as a server-sent event; only a stored one has an id. None is a comment line.

    All watchers of a conversation get the same frame at the same time, so the last few are remembered.
    """
    if ready is None:
        return COMMENT
    lines = [f"id: {ready.seq}"] if ready.seq else []
    lines.append(f"event: {ready.kind}")
    text = ready.text if ready.text.isascii() else ready.text.translate(_OTHER_LINE_ENDS)
    lines.extend(f"data: {line}" for line in _LINE_END.split(text))
    return ("\n".join(lines) + "\n\n").encode("utf-8", "replace")


class EventStream(Response):
    """A response that writes frames until they end, or the client goes or loses access.

    For one that has taken nothing for `pace.send_s` seconds no more frames are kept: when it reads again within `pace.linger_s` seconds, it
    is told that it was cut off. All that it costs meanwhile is the piece that it does not take.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: Frames, parts: Parts, caller: Caller) -> None:
        headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
        super().__init__(b"", 200, headers, media_type=self.media_type)
        del self.headers["content-length"]
        self._frames = frames
        self._parts = parts
        self._caller = caller
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The writer ends by itself; else it is ended when the client hangs up, or never takes what it is sent.
        writing = asyncio.create_task(self._write(send))
        leaving = asyncio.create_task(departure(receive))
        ended: set[asyncio.Task[None]] = set()
        pace = self._parts.pace
        try:
            while not ended and self._stalled_s() < (1.0 if self._parts.hub.stopping else pace.linger_s):
                ended, _ = await asyncio.wait((writing, leaving), timeout=pace.send_s / 4, return_when=asyncio.FIRST_COMPLETED)
                if self._stalled_s() > pace.send_s:
                    self._frames.cut_off()
        finally:
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)
        if not ended:
            self._parts.meters.cut_off.inc()
            log.info("a client that does not read its frames was hung up on")
        if not writing.cancelled():
            writing.result()

    async def _write(self, send: Send) -> None:
        now, sent = asyncio.get_running_loop().time, self._parts.meters.frames.labels("sse")
        frames, waiting, size = self._frames, [], 0
        async with aclosing(frames), aclosing(self._begun(send)) as begun:
            try:
                await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                recheck_at = now() + self._parts.pace.recheck_s
                async for ready in begun:
                    waiting.append(as_event(ready))
                    size += len(waiting[-1])
                    if ready is not None:
                        sent.inc()
                        if was_cut_off(ready):
                            self._parts.meters.cut_off.inc()
                    if not frames.at_hand or size >= PIECE_BYTES:
                        await self._piece(send, b"".join(waiting))
                        waiting, size = [], 0
                    if now() >= recheck_at:
                        if not await still_welcome(self._parts, self._caller):
                            waiting.append(as_event(LOST_ACCESS))
                            break
                        recheck_at = now() + self._parts.pace.recheck_s
                await self._send(send, {"type": "http.response.body", "body": b"".join(waiting), "more_body": False})
            except OSError:
                log.debug("a client of frames went away")

    async def _begun(self, send: Send) -> AsyncGenerator[Frame | None, None]:
        """The frames; where the first lets wait, a comment goes before it."""
        first = asyncio.ensure_future(anext(self._frames, None))
        try:
            if not (await asyncio.wait((first,), timeout=FIRST_BYTE_S))[0]:
                await self._piece(send, COMMENT)
            yield await first
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        async for ready in self._frames:
            yield ready

    async def _piece(self, send: Send, body: bytes) -> None:
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})

    async def _send(self, send: Send, message: dict[str, object]) -> None:
        # Looked at by `_stalled` now and then: a timer for each piece would be half the work of a frame.
        self._sending_since = asyncio.get_running_loop().time()
        await send(message)
        self._sending_since = None

    def _stalled_s(self) -> float:
        since = self._sending_since
        return 0.0 if since is None else asyncio.get_running_loop().time() - since


#: What a watcher is told whose key was revoked, or whose token has expired.
LOST_ACCESS = Frame(
    0,
    "",
    str(FrameKind.ERROR),
    json.dumps({"kind": str(FrameKind.ERROR), "code": "unauthorized", "detail": "the token does not hold any more"}, separators=(",", ":")),
)


def was_cut_off(ready: Frame) -> bool:
    """Whether this frame tells a watcher that it fell behind."""
    return not ready.seq and ready.kind == FrameKind.ERROR


async def still_welcome(parts: Parts, caller: Caller) -> bool:
    """Whether a watcher's caller still may come in; a store that does not answer ends no stream."""
    if caller.expires_at is not None:
        return parts.door.still(caller)  # only the clock is looked at
    try:
        return await run_in_threadpool(parts.door.still, caller)
    except StoreUnavailable:
        return True


async def departure(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
