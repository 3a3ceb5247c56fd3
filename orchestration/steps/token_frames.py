"""The pieces of an answer on their way to watchers, as few frames as a reader needs."""

from __future__ import annotations

import time
from collections.abc import Callable

from orchestration.core.errors import Fenced
from orchestration.core.frames import FrameKind, frame
from orchestration.core.model import Delta
from orchestration.core.safe_json import clean_text
from orchestration.state.journal import Claim
from orchestration.steps.faults import reached
from orchestration.wiring import Ports

#: Shortest pause between two token frames of one step, in seconds.
FRAME_PAUSE_S = 0.04


class TokenFrames:
    """Collects the pieces of an answer into frames, at most one of a kind each 40 ms; what is left goes out with the commit.

    Raises Fenced into the model's adapter when the step is no longer ours, which stops the answer.
    """

    def __init__(self, claim: Claim, ports: Ports, clock: Callable[[], float] = time.monotonic) -> None:
        self._claim = claim
        self._ports = ports
        self._clock = clock
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._last = clock()  # an answer that comes at once goes out with its commit
        self._number = 0

    @property
    def any(self) -> bool:
        """Whether a watcher has been shown something of this answer."""
        return self._number > 0

    def __call__(self, delta: Delta) -> None:
        if delta.text:
            self._text.append(delta.text)
        if delta.thinking:
            self._thinking.append(delta.thinking)
        now = self._clock()
        if now - self._last < FRAME_PAUSE_S:
            return
        frames = self.rest()
        if not frames:
            return
        self._last = now
        reached("streaming", self._claim.step)
        self._emit(frames)

    def void(self) -> None:
        """Take back what was shown: the same step asks again.

        Raises:
            Fenced: the step is no longer ours.
        """
        self._text.clear()
        self._thinking.clear()
        if self.any:
            step = self._claim.step
            self._emit([frame(FrameKind.RETRY, step.turn_id, step.round)])

    def _emit(self, frames: list[str]) -> None:
        self._number += 1
        if not self._ports.journal.emit(self._claim, self._number, frames):
            raise Fenced(f"step {self._claim.step.task_id} was passed on, or its turn has ended")

    def rest(self) -> list[str]:
        """Frames of what was collected and not yet sent."""
        step = self._claim.step
        frames = []
        for kind, pieces in ((FrameKind.THINKING, self._thinking), (FrameKind.TOKEN, self._text)):
            text = clean_text("".join(pieces))
            if text:
                frames.append(frame(kind, step.turn_id, step.round, text=text))
            pieces.clear()
        return frames
