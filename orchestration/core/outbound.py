"""Outbound deliveries: what somebody outside is told, by a call to a turn's `callback_url` or by a function of the user's module.

A delivery has one name for good, made from what it tells, so that the same event is one delivery however often it is committed.
When it is tried again, and when it is given up, is decided here; sending is for `orchestration/outbound/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orchestration.core.turn import TurnRequest

#: Pauses between attempts, in seconds; the last one is used again until `GIVE_UP_S`.
PAUSES_S = (5, 15, 60, 300, 900, 1800, 3600, 7200, 14400)

#: How long after its event a delivery is tried, in seconds: 24 h.
GIVE_UP_S = 86_400


class Way(StrEnum):
    """How somebody is told."""

    CALLBACK = "callback"  #: a POST to the turn's `callback_url`
    HOOK = "hook"  #: `on_approval_request` in the user's module
    ANSWER = "answer"  #: `on_answer` of the webhook that the turn came from
    ROUND = "round"  #: `on_round` of the agent that ended the turn; of the rounds before, the turn's own steps tell


class OutboundEvent(StrEnum):
    """What is told."""

    TURN_ENDED = "turn.ended"  #: a turn has ended
    APPROVAL_REQUESTED = "approval.requested"  #: a human is asked
    APPROVAL_REMINDER = "approval.reminder"  #: a human was asked, and the time is nearly up


@dataclass(frozen=True, slots=True)
class Delivery:
    """One thing told one way. `subject` is the id of the turn or approval; `number` tells the times that a human was asked apart."""

    way: Way
    event: OutboundEvent
    subject: str
    number: int = 1

    @property
    def name(self) -> str:
        """Its name, which is also what a queue's message carries; `parse` takes it back."""
        return f"{self.way}.{str(self.event).replace('.', '_')}.{self.subject}.{self.number}"

    @property
    def message_id(self) -> str:
        """The id that a receiver sees, the same at each attempt."""
        return self.name.replace(".", "-")

    @classmethod
    def parse(cls, name: str) -> Delivery:
        """The delivery of a name; raises ValueError when it is none."""
        way, event, subject, number = name.split(".")
        return cls(Way(way), OutboundEvent(event.replace("_", ".")), subject, int(number))


def told_at_end(request: TurnRequest) -> list[Way]:
    """The ways in which the outside is told that the turn of `request` has ended."""
    return [way for way, wanted in ((Way.CALLBACK, request.callback_url), (Way.ANSWER, request.webhook)) if wanted]


def pause_s(attempt: int, since_s: float, asked_for_s: float = 0.0) -> float | None:
    """Seconds from the end of the `attempt`th attempt to the next one; None when it is given up.

    Args:
        since_s: seconds since the event.
        asked_for_s: the pause that the other side asked for.
    """
    pause = max(float(PAUSES_S[min(attempt, len(PAUSES_S)) - 1]), asked_for_s)
    return pause if since_s + pause <= GIVE_UP_S else None
