"""Typed ids. Each begins with what it is; those inside a turn are derived from it, so that a step done again names the same things."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum

#: What the API takes as an id.
ID_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def is_id(text: str) -> bool:
    """Whether `text` is an id as the API takes them."""
    return _ID.fullmatch(text) is not None


def new_turn_id() -> str:
    """A new turn's id: unguessable."""
    return "tn_" + secrets.token_hex(12)


def new_conversation_id() -> str:
    """A new conversation's id: unguessable."""
    return "cv_" + secrets.token_hex(12)


def conversation_id_from(text: str) -> str:
    """The conversation that a foreign name (a phone number, a channel) stands for: the name itself where it is an id, else a hash of it."""
    return text if is_id(text) else "cv_" + hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:40]


def call_id(turn_id: str, round_: int, index: int) -> str:
    """The id of one tool call, unique in its conversation whatever ids a model makes up; also its idempotency key."""
    return f"tc_{turn_id[3:]}_{round_}_{index}"


def approval_id(turn_id: str, round_: int, index: int) -> str:
    """The id of the approval that one tool call needs."""
    return f"ap_{turn_id[3:]}_{round_}_{index}"


class StepKind(StrEnum):
    """What a step does."""

    PLAN = "plan"  #: ask the model once
    TOOL = "tool"  #: ask the mesh once
    OBSERVE = "observe"  #: put the round's results into the conversation
    DECIDE = "decide"  #: carry out a decision: send the suspended tool step again


@dataclass(frozen=True, slots=True)
class StepId:
    """One durable unit of work. Its text form is what queues, indexes and leases carry."""

    tenant: str
    turn_id: str
    round: int
    kind: StepKind
    index: int = 0

    def __str__(self) -> str:
        return f"{self.tenant}/{self.turn_id}/{self.round}/{self.kind}/{self.index}"

    @classmethod
    def parse(cls, text: str) -> StepId:
        """The step of a text form; raises ValueError when it is none."""
        tenant, turn_id, round_, kind, index = text.split("/")
        return cls(tenant, turn_id, int(round_), StepKind(kind), int(index))

    @property
    def field(self) -> str:
        """Its name inside the turn's journal."""
        return f"s:{self.round}:{self.kind}:{self.index}"

    @property
    def task_id(self) -> str:
        """The id of its Celery task; the same however often it is sent."""
        tail = f".{self.index}" if self.kind in (StepKind.TOOL, StepKind.DECIDE) else ""
        return f"{self.turn_id}.{self.round}.{self.kind}{tail}"

    @property
    def root_task_id(self) -> str:
        """The id of the turn's first task."""
        return f"{self.turn_id}.1.plan"

    @property
    def parent_task_id(self) -> str | None:
        """The id of the task that leads to it; an observe goes on with the next plan in the same task."""
        if self.kind is StepKind.PLAN:
            return None
        if self.kind is StepKind.OBSERVE:
            return f"{self.turn_id}.{self.round}.tool.0"
        if self.kind is StepKind.DECIDE:
            return f"{self.turn_id}.{self.round}.tool.{self.index}"
        return self.root_task_id if self.round == 1 else f"{self.turn_id}.{self.round - 1}.observe"
