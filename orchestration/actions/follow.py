"""Follow a turn or a conversation: its frames from a number on, each once, in order, stored and live alike.

The rules of `Last-Event-ID` are here: where a stream begins, what a gap frame says, when nothing is left. How frames travel from Redis is
the hub's business, how they are written to a client the gateway's.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestration.core.errors import BadEventId, NotFound, StoreUnavailable
from orchestration.core.frames import FrameKind
from orchestration.state.frame_hub import MAX_SEQ, FrameHub
from orchestration.state.watcher import Frame, Watcher, gap_frame

if TYPE_CHECKING:
    from orchestration.actions.read import TurnPlace

#: Seconds without a frame after which a follower gets None instead: time for a sign of life.
IDLE_S = 15.0


class Frames(AsyncIterator[Frame | None]):
    """Frames to be read one by one. `at_hand` tells whether the next one is there already, for who would send several at once."""

    def __init__(self) -> None:
        self.watcher: Watcher | None = None
        self.source: AsyncGenerator[Frame | None, None] | None = None

    @property
    def at_hand(self) -> bool:
        """Whether the next frame is there already."""
        return self.watcher is not None and self.watcher.at_hand

    def cut_off(self) -> None:
        """Stop watching for a reader that does not read; it will be told when it does."""
        if self.watcher is not None:
            self.watcher.cut_off()

    async def __anext__(self) -> Frame | None:
        assert self.source is not None
        return await self.source.__anext__()

    async def aclose(self) -> None:
        """Stop watching."""
        assert self.source is not None
        await self.source.aclose()


Locate = Callable[[], Awaitable["TurnPlace"]]


def event_id(header: str | None, name: str = "Last-Event-ID") -> int | None:
    """The number in a `Last-Event-ID`, or in what is called `name`; None when there is none, or an empty one.

    Raises:
        BadEventId: it is no positive integer.
    """
    text = (header or "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,1000}", text) or not text.strip("0"):
        raise BadEventId(f"{name} is a positive integer: the number of the last frame seen")
    return min(int(text), MAX_SEQ)


async def follow_turn(
    hub: FrameHub, tenant: str, turn_id: str, locate: Locate, after: int | None, *, idle_s: float = IDLE_S
) -> Frames | None:
    """The frames of one turn, from its first or from those after number `after`; they end after `done`.

    Returns None when nothing is left of an ended turn. A None among the frames says that nothing came for `idle_s` seconds.
    Close the generator when it is not read to its end.

    Args:
        locate: tells where the turn's frames are, now; asked again when nothing comes.

    Raises:
        NotFound, StoreUnavailable: as `locate` does, before anything is yielded.
    """
    place = await locate()
    bounds = await hub.bounds(tenant, place.conversation_id)
    start = _Start(max(place.first_seq - 1, 0), exact=place.first_seq > 0)
    if after is not None and after > bounds.last:
        # The number is of a time that this store has not seen (a backup was restored). The end of an ended turn is told again: without
        # it the client would come back for ever.
        position = min(bounds.last, place.last_seq - 1) if place.ended else bounds.last
        start = _Start(max(position, 0), exact=place.ended, lost=(bounds.last + 1, after))
    elif after is not None and place.ended and after >= place.last_seq:
        return None
    elif after is not None and after >= place.first_seq:
        start = _Start(after)
    frames = Frames()
    frames.source = _turn_frames(frames, hub, tenant, turn_id, locate, place, start, idle_s)
    return frames


async def follow_conversation(
    hub: FrameHub,
    tenant: str,
    conversation_id: str,
    still_there: Callable[[], Awaitable[object]],
    after: int | None,
    *,
    idle_s: float = IDLE_S,
) -> Frames:
    """The frames of all turns of a conversation, those kept or those after number `after`, and then live until the reader goes.

    Args:
        still_there: raises NotFound once the conversation was deleted, which ends the frames; asked at the start and when nothing comes.

    Raises:
        NotFound, StoreUnavailable: before anything is yielded.
    """
    await still_there()
    bounds = await hub.bounds(tenant, conversation_id)
    start = _Start(after or 0)
    if after is not None and after > bounds.last:
        start = _Start(bounds.last, lost=(bounds.last + 1, after))
    frames = Frames()
    frames.source = _conversation_frames(frames, hub, tenant, conversation_id, still_there, start, idle_s)
    return frames


async def wait_for_end(hub: FrameHub, tenant: str, turn_id: str, locate: Locate, timeout_s: float) -> bool:
    """Whether the turn ended within `timeout_s` seconds; holds no thread while it waits. Faults of the store count as "not yet"."""
    try:
        async with asyncio.timeout(timeout_s):
            while not (await locate()).ended:
                frames = await follow_turn(hub, tenant, turn_id, locate, None)
                if frames is None:
                    return True
                async with aclosing(frames):
                    async for ready in frames:
                        if ready is not None and ready.kind == FrameKind.DONE:
                            return True
                if hub.stopping:
                    return False
                await asyncio.sleep(0.1)  # cut off as too slow, or its frames were trimmed: look again
            return True
    except (TimeoutError, StoreUnavailable, NotFound):
        return False


@dataclass(frozen=True, slots=True)
class _Start:
    position: int
    exact: bool = False
    lost: tuple[int, int] | None = None


async def _turn_frames(
    frames: Frames, hub: FrameHub, tenant: str, turn_id: str, locate: Locate, place: TurnPlace, start: _Start, idle_s: float
) -> AsyncGenerator[Frame | None, None]:
    if start.lost:
        yield gap_frame(*start.lost, turn_id)
    async with hub.watch(tenant, place.conversation_id, after=start.position, exact=start.exact) as watcher:
        frames.watcher = watcher
        now = asyncio.get_running_loop().time
        due = now() + idle_s
        while True:
            ready = await watcher.next(max(due - now(), 0))
            if ready is None and watcher.over:
                return
            if ready is not None and ready.seq and ready.turn_id != turn_id:
                # Frames of other turns are no sign of life to this follower.
                ready = None
                if now() < due and not _past(watcher, place):
                    continue
            yield ready
            due = now() + idle_s
            if ready is not None and ready.kind == FrameKind.DONE:
                return
            if ready is None or not ready.seq:
                try:
                    place = await locate()
                except NotFound:
                    return
                except StoreUnavailable:
                    continue
            if _past(watcher, place):
                return


async def _conversation_frames(
    frames: Frames,
    hub: FrameHub,
    tenant: str,
    conversation_id: str,
    still_there: Callable[[], Awaitable[object]],
    start: _Start,
    idle_s: float,
) -> AsyncGenerator[Frame | None, None]:
    if start.lost:
        yield gap_frame(*start.lost)
    async with hub.watch(tenant, conversation_id, after=start.position) as watcher:
        frames.watcher = watcher
        while True:
            ready = await watcher.next(idle_s)
            if ready is None and watcher.over:
                return
            yield ready
            if ready is None:
                try:
                    await still_there()
                except NotFound:
                    return
                except StoreUnavailable:
                    continue


def _past(watcher: Watcher, place: TurnPlace) -> bool:
    """Whether nothing of the turn can come any more."""
    return bool(place.ended and watcher.position >= place.last_seq)
