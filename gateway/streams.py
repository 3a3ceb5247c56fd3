"""Frames as server-sent events: one event per frame, a comment line in silence, and an end for clients that do not read.

Which frames, and when they end, is for `orchestration/actions/follow.py`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import aclosing

from fastapi import Response
from starlette.types import Receive, Scope, Send

from gateway.parts import Pace
from orchestration.actions.follow import Frames
from orchestration.state.watcher import Frame

log = logging.getLogger(__name__)

_LINE_END = re.compile(r"\r\n|\r|\n")

#: Characters that the event stream format does not end lines at, but many a client's line reader does; in JSON they may be escaped.
_OTHER_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


def as_event(ready: Frame | None) -> bytes:
    """One frame as a server-sent event; only a stored one has an id. None is a comment line, which keeps proxies awake."""
    if ready is None:
        return b": still here\n\n"
    lines = [f"id: {ready.seq}"] if ready.seq else []
    lines.append(f"event: {ready.kind}")
    text = ready.text if ready.text.isascii() else ready.text.translate(_OTHER_LINE_ENDS)
    lines.extend(f"data: {line}" for line in _LINE_END.split(text))
    return ("\n".join(lines) + "\n\n").encode("utf-8", "replace")


class EventStream(Response):
    """A response that writes frames until they end, the client goes, or the client has taken nothing for `pace.send_s` seconds."""

    media_type = "text/event-stream"

    def __init__(self, frames: Frames, pace: Pace) -> None:
        headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
        super().__init__(b"", 200, headers, media_type=self.media_type)
        del self.headers["content-length"]
        self._frames = frames
        self._pace = pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The writer ends by itself; the other task ends it when the client hangs up in between.
        writing = asyncio.create_task(self._write(send))
        leaving = asyncio.create_task(_departure(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)
        if not writing.cancelled():
            writing.result()

    async def _write(self, send: Send) -> None:
        async with aclosing(self._frames):
            try:
                await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for ready in self._frames:
                    await self._send(send, {"type": "http.response.body", "body": as_event(ready), "more_body": True})
                await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
            except TimeoutError:
                log.info("a client that does not read its frames was cut off")
            except OSError:
                log.debug("a client of frames went away")

    async def _send(self, send: Send, message: dict[str, object]) -> None:
        async with asyncio.timeout(self._pace.send_s):
            await send(message)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
