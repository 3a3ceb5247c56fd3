"""The values in which a round is decided about: where a turn stands, the calls that make up a round, and what may follow it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestration.core.accounts import Account
from orchestration.core.agent import Agent
from orchestration.core.call import CallRecord, CallResult
from orchestration.core.catalogue import Catalogue
from orchestration.core.limits import NOTHING, Limits, Spent
from orchestration.core.policy import Rule, no_rule
from orchestration.core.turn import StopReason


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a turn stands in one round: all that what follows depends on.

    What was `spent`, also of the `accounts` of those above, includes the reply that is decided about;
    `invalid` counts the turn's invalid typed answers, `handoffs` how often it was handed over, `depth` how many agents lie above it.
    """

    turn_id: str
    round: int
    agent: Agent
    limits: Limits
    catalogue: Catalogue
    spent: Spent = NOTHING
    conversation_spent: Spent = NOTHING
    accounts: tuple[Account, ...] = ()
    invalid: int = 0
    handoffs: int = 0
    depth: int = 0
    rule: Rule = no_rule

    @property
    def last(self) -> bool:
        """Whether the calls of this round are not run any more."""
        return self.limits.max_rounds is not None and self.round >= self.limits.max_rounds

    @property
    def closing(self) -> bool:
        """Whether the model is asked once more, for its answer only."""
        return is_closing(self.agent, self.limits, self.round)


def is_closing(agent: Agent, limits: Limits, round_: int) -> bool:
    """Whether in this round an agent is asked for its answer only."""
    return agent.on_round_limit == "answer" and limits.max_rounds is not None and round_ > limits.max_rounds


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call of the round to come. `result` is set when the loop answers it itself: such a call never has a step."""

    record: CallRecord
    result: CallResult | None = None

    @property
    def gated(self) -> bool:
        """Whether a human is asked before it runs."""
        return self.result is None and self.record.gate is not None

    @property
    def plain(self) -> bool:
        """Whether it is asked of the mesh, so that its result has no effect but to be read."""
        return self.result is None and not self.record.loop and not self.record.agent


@dataclass(frozen=True, slots=True)
class CallTools:
    """The model asked for tools: these calls make up the round. `sequential` says that each runs when those before it have ended."""

    text: str
    calls: tuple[PlannedCall, ...]
    sequential: bool = False

    @property
    def headers(self) -> list[int]:
        """The indexes of the calls that have a step."""
        return [index for index, planned in enumerate(self.calls) if planned.result is None]


@dataclass(frozen=True, slots=True)
class EndTurn:
    """The turn ends: with `text` as its answer, `output` as its typed one, or `error` (`code`, `detail`, and perhaps more).

    `calls` are those of a last round in which nothing is left to run.
    """

    reason: StopReason
    text: str
    output: Any = None
    error: dict[str, Any] | None = None
    calls: tuple[PlannedCall, ...] = ()


@dataclass(frozen=True, slots=True)
class NextRound:
    """The model is asked again: the one of `agent`, where the conversation was handed over."""

    agent: str = ""
