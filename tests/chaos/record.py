"""What the people of a chaos run did and saw: the side of the story that Turnmill's own records are compared with at the end."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.workload import Submission


@dataclass(frozen=True, slots=True)
class Accepted:
    """A submission that the gateway took: as a turn of its own, or as an input that joined the turn `turn_id`."""

    submission: Submission
    conversation_id: str
    turn_id: str


@dataclass(frozen=True, slots=True)
class Seen:
    """One frame as a watcher got it. `seq` is 0 where the event had no id."""

    seq: int
    event: str
    data: dict[str, Any]


@dataclass(slots=True)
class Watch:
    """All that one watcher got over its connections; `turn_id` is empty for one of a whole conversation, who may have a channel
    with `agent` instead of a stream."""

    conversation_id: str
    turn_id: str = ""
    agent: str = ""
    frames: list[Seen] = field(default_factory=list)
    connections: int = 0

    @property
    def last(self) -> int:
        """The number of the last frame seen; 0 for none."""
        return next((frame.seq for frame in reversed(self.frames) if frame.seq), 0)

    @property
    def done(self) -> bool:
        """Whether it has seen `done`."""
        return any(frame.event == "done" for frame in self.frames)


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision that was answered with 200."""

    approved: bool
    arguments: dict[str, Any]


class Record:
    """Filled in by the people and the hand while the run lasts; read by the verdict."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.sent: list[tuple[str, Submission]] = []  #: every submission with its conversation, in the order in which each was first sent
        self.accepted: dict[str, Accepted] = {}  #: by the submission's name
        self.doubtful: set[str] = set()  #: names of those sent once, without a key, whose answer got lost
        self.rejected: set[str] = set()
        self.watches: list[Watch] = []
        self.decided: dict[str, list[Decided]] = {}
        self.reopened: Counter[str] = Counter()  #: approvals, by how often somebody asked that they be reopened
        self.cancel_wished: set[str] = set()  #: turns
        self.cancelled: set[str] = set()  #: turns whose cancel was answered with 200
        self.calls_cancelled: set[str] = set()  #: calls whose cancel was answered with 200
        self.faults: list[str] = []  #: what no user should ever see, as it was seen
        self.story: list[str] = []  #: what was done to the processes, and when
        self.answers: Counter[str] = Counter()

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    def tell(self, what: str) -> None:
        """Note something that was done."""
        self.story.append(f"{self.now_s:7.2f} {time.strftime('%H:%M:%S')} {what}")

    def fault(self, what: str) -> None:
        """Note something that must not happen."""
        self.faults.append(f"at {self.now_s:.2f} s ({time.strftime('%H:%M:%S')}): {what}")
