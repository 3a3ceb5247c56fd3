"""One watcher of one conversation: merges what is stored with what is published, each frame once and in order, in bounded memory.

It reads pages of the stream until it has caught up, then takes what the hub pushes. How published frames reach it is the hub's business.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from orchestration.core.errors import StoreUnavailable
from orchestration.core.frames import FrameKind, frame, gap, numbered

#: The largest page of a backlog, in frames; pages get smaller where frames are large.
_PAGE_FRAMES = 500

_KIND = re.compile(r'\{"kind":"([a-z_]+)"')


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as a watcher gets it. `seq` is 0 for one that is not stored (a gap, a cut)."""

    seq: int
    turn_id: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is kept of a conversation's frames: the numbers of the first kept and of the last given out (0: none).

    `trimmed` says whether older ones than the first kept were there once.
    """

    first: int
    last: int
    trimmed: bool


def stored_frame(seq: int, turn_id: str, body: str) -> Frame:
    """The frame of a stream entry or of a published text; raises ValueError when it is none."""
    found = _KIND.match(body)
    if found is None:
        raise ValueError("a frame begins with its kind")
    return Frame(seq, turn_id, found.group(1), numbered(seq, body))


def gap_frame(first: int, last: int, turn_id: str = "") -> Frame:
    """The frame that says that numbers `first` to `last` are gone."""
    return Frame(0, turn_id, str(FrameKind.GAP), gap(first, last, turn_id or None))


@dataclass(frozen=True, slots=True)
class Buffer:
    """How much that was published may wait for one watcher before it is cut off."""

    frames: int
    chars: int


class FrameStore(Protocol):
    """The stored frames, as far as a watcher needs them. Both raise StoreUnavailable."""

    async def entries(self, stream: str, first: int, count: int) -> list[Frame]:
        """At most `count` stored frames from number `first` on."""
        ...

    async def bounds_of(self, stream: str) -> Bounds:
        """What is kept in one stream."""
        ...


class Watcher:
    """One who watches one conversation.

    `position` is the number of the last frame handed out; `over` says that no more will come.

    Args:
        stream: the key of the stored frames.
        subscribed: set while published frames are pushed; the stream is read only then, so that nothing falls between the two.
        after: where to begin; 0 for all that are kept.
        exact: the frame numbered `after + 1` certainly existed.
    """

    def __init__(self, store: FrameStore, stream: str, subscribed: asyncio.Event, after: int, *, exact: bool, buffer: Buffer) -> None:
        self.position = after
        self.over = False
        self._store = store
        self._stream = stream
        self._subscribed = subscribed
        self._buffer = buffer
        self._exact = exact
        self._page: deque[Frame] = deque()
        self._live: deque[Frame] = deque()
        self._live_bytes = 0
        self._behind = True
        self._reading = False
        self._page_frames = 16
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def next(self, timeout_s: float) -> Frame | None:
        """The next frame, each once and in order; None when `timeout_s` seconds brought none, or when the watch is over."""
        now = asyncio.get_running_loop().time
        due = now() + timeout_s
        try:
            while True:
                ready = self._take()
                if ready is not None or self.over:
                    return ready
                if self._behind:
                    async with asyncio.timeout_at(due):
                        await self._catch_up()
                elif now() >= due:
                    raise TimeoutError
                else:
                    self._wake.clear()
                    self._ring_at(due)
                    await self._wake.wait()
        except TimeoutError:
            # Publishing promises nothing: after a silence the stream has the last word.
            self.fall_behind()
            return None

    @property
    def at_hand(self) -> bool:
        """Whether the next frame is there already."""
        return bool(self._page or (self._live and not self._behind))

    def _ring_at(self, due: float) -> None:
        # One timer serves many waits: it rings early at worst, and is set again then. A timer for each would be half the work of a frame.
        if self._timer is None or self._timer.when() > due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._wake.set()

    def push(self, ready: Frame) -> None:
        """Take a frame that was just published. One whose buffer is full is cut off; one that still reads its backlog reads on there."""
        # While behind, the stream already holds whatever is published and will be read from there.
        if self.over or self._behind or ready.seq <= self.position:
            return
        self._live.append(ready)
        self._live_bytes += len(ready.text)
        if len(self._live) > self._buffer.frames or self._live_bytes > self._buffer.chars:
            if self._page or self._reading:
                self.fall_behind()
            else:
                self.cut_off()
        self._wake.set()

    def fall_behind(self) -> None:
        """Forget what was published and read the stream from the last number instead."""
        self._behind = True
        self._drop_live()
        self._wake.set()

    def end(self) -> None:
        """No more frames, from now on."""
        self.over = True
        self._page.clear()
        self._drop_live()
        self._wake.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def cut_off(self) -> None:
        """Keep nothing for a reader that does not read; what it gets next says so, and is the last."""
        if self.over:
            return
        turn_id = self._live[-1].turn_id if self._live else ""
        detail = f"fell behind by more than {self._buffer.frames} frames, or for too long; come back with the last number seen"
        self.end()
        self._page.append(Frame(0, turn_id, str(FrameKind.ERROR), frame(FrameKind.ERROR, turn_id, code="slow_consumer", detail=detail)))

    def _drop_live(self) -> None:
        self._live.clear()
        self._live_bytes = 0

    def _take(self) -> Frame | None:
        if self._page:
            return self._hand_out(self._page.popleft())
        while self._live and not self._behind:
            ready = self._live.popleft()
            self._live_bytes -= len(ready.text)
            if ready.seq > self.position:
                return self._hand_out(ready)
        return None

    def _hand_out(self, ready: Frame) -> Frame:
        self.position = max(self.position, ready.seq)
        return ready

    async def _catch_up(self) -> None:
        await self._subscribed.wait()
        self._behind, self._reading = False, True
        caught_up = False
        try:
            caught_up = await self._read_page()
        except StoreUnavailable:
            await asyncio.sleep(0.2)  # the hub's own connection may not have noticed yet
        finally:
            self._reading = False
            if not caught_up:
                self.fall_behind()

    async def _read_page(self) -> bool:
        """Read what follows `position` into the page; whether that was all."""
        asked = self._page_frames + 1
        entries = await self._store.entries(self._stream, self.position, asked)
        more = len(entries) == asked
        if entries and entries[0].seq == self.position:
            entries = entries[1:]
        elif self.position:
            await self._note_gap(entries[0].seq if entries else 0)
        self._exact = False
        self._page.extend(entries)
        if entries:
            average = sum(len(entry.text) for entry in entries) // len(entries) + 1
            self._page_frames = max(1, min(_PAGE_FRAMES, self._buffer.chars // average))
        return not more

    async def _note_gap(self, first_read: int) -> None:
        """The entry at `position` is not there. Say so where that means that frames after it are gone too, as far as anybody can know."""
        lost_until = 0
        if first_read and self._exact:
            lost_until = first_read - 1
        else:
            bounds = await self._store.bounds_of(self._stream)
            if first_read and bounds.trimmed and bounds.first > self.position:
                lost_until = first_read - 1
            elif not first_read and not bounds.first:
                lost_until = bounds.last
        if lost_until > self.position:
            self._page.append(gap_frame(self.position + 1, lost_until))
            self.position = lost_until
