"""A turn: its states, why it stopped, and what is recorded of it. `docs/states.md` draws the tables below."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from orchestration.core.principal import Principal


class TurnState(StrEnum):
    """Where a turn stands."""

    QUEUED = "queued"  #: waits in its conversation's mailbox
    RUNNING = "running"  #: a step of it is under way or on its way
    WAITING = "waiting"  #: every open call waits for a human; holds no worker
    COMPLETED = "completed"  #: ended with an answer, or at a bound that still gives one
    FAILED = "failed"  #: ended without one
    CANCELLED = "cancelled"  #: ended by somebody's wish


class StopReason(StrEnum):
    """Why a turn ended."""

    ANSWER = "answer"  #: the model answered
    EMPTY = "empty"  #: the model answered with nothing
    ROUND_LIMIT = "round_limit"  #: the model kept asking for tools
    BUDGET = "budget"  #: a budget was used up
    DEADLINE = "deadline"  #: its time was up
    INVALID_OUTPUT = "invalid_output"  #: the typed answer did not fit
    APPROVAL_EXPIRED = "approval_expired"  #: nobody decided, and the gate ends the turn then
    CANCELLED = "cancelled"  #: somebody cancelled or interrupted it
    ERROR = "error"  #: a step failed for good


class OnBusy(StrEnum):
    """What happens to a submission whose conversation has a turn under way."""

    QUEUE = "queue"  #: it waits in order
    REJECT = "reject"  #: it is refused
    INTERRUPT = "interrupt"  #: the turn under way is cancelled, then this one starts
    STEER = "steer"  #: it joins the turn under way and is seen by its next plan


#: Which state may follow which; the ends are final.
FOLLOWS: dict[TurnState, frozenset[TurnState]] = {
    TurnState.QUEUED: frozenset({TurnState.RUNNING, TurnState.CANCELLED, TurnState.FAILED}),
    TurnState.RUNNING: frozenset({TurnState.WAITING, TurnState.COMPLETED, TurnState.FAILED, TurnState.CANCELLED}),
    TurnState.WAITING: frozenset({TurnState.RUNNING, TurnState.COMPLETED, TurnState.FAILED, TurnState.CANCELLED}),
    TurnState.COMPLETED: frozenset(),
    TurnState.FAILED: frozenset(),
    TurnState.CANCELLED: frozenset(),
}

ENDED = frozenset(state for state, following in FOLLOWS.items() if not following)


def state_at_end(reason: StopReason) -> TurnState:
    """The final state of a turn that stopped for `reason`."""
    if reason is StopReason.CANCELLED:
        return TurnState.CANCELLED
    if reason in (StopReason.ANSWER, StopReason.EMPTY, StopReason.ROUND_LIMIT):
        return TurnState.COMPLETED
    return TurnState.FAILED


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What was submitted; never changes. Times are epoch milliseconds of the store.

    `parent` is the call of another turn's that this one answers (see `core/agent_tool.py`), and `accounts` are the budgets that it
    shares with those above it (see `core/accounts.py`); both are empty for a turn that somebody submitted.
    """

    turn_id: str
    tenant: str
    agent: str
    conversation_id: str
    principal: Principal
    input: str | list[dict[str, Any]]
    brief: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    callback_url: str = ""
    deadline_s: float | None = None
    model: str = ""
    traceparent: str = ""
    snapshot: str = ""
    webhook: str = ""
    parent: dict[str, Any] = field(default_factory=dict)
    accounts: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` takes it back."""
        data = {name: getattr(self, name) for name in self.__slots__}
        data["principal"] = self.principal.as_json()
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TurnRequest:
        known = {name: data[name] for name in cls.__slots__ if name in data}
        known["principal"] = Principal.from_json(data["principal"])
        return cls(**known)
