"""Budgets that a turn shares with others: those of the turns that asked for it, and of their conversations.

What an agent uses counts at once for whoever asked it, so several agents that work side by side see what the others have used.
Before each model call and before tools run, all accounts above are looked at: together they go over a bound by no more than the
model calls that were under way when it was reached, and by no tool call at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from orchestration.core.limits import NOTHING, Budget, Limits, Spent
from orchestration.core.turn import TurnRequest

_NAMES = {"turn": "asking turn", "conversation": "asking conversation"}


@dataclass(frozen=True, slots=True)
class Account:
    """A budget of somebody above: of the turn or the conversation of this id, with what all have used of it so far."""

    kind: Literal["turn", "conversation"]
    id: str
    bounds: Budget
    spent: Spent = NOTHING

    def as_json(self) -> dict[str, Any]:
        """A JSON object of what never changes."""
        return {"kind": self.kind, "id": self.id, "bounds": self.bounds.as_json()}


def accounts_of(request: TurnRequest) -> list[Account]:
    """The accounts that a turn works on besides its own, nothing spent yet."""
    return [Account(one["kind"], one["id"], Budget(**one["bounds"])) for one in request.accounts]


def accounts_below(request: TurnRequest, limits: Limits) -> list[Account]:
    """The accounts of a turn that the one of `request`, within `limits`, asks for. Model calls and time are each turn's own."""
    own = [Account("turn", request.turn_id, limits.budget)]
    if limits.conversation is not None:
        own.append(Account("conversation", request.conversation_id, replace(limits.conversation, max_rounds=None, deadline_s=None)))
    return [*accounts_of(request), *(account for account in own if account.bounds != Budget())]


def used_up(limits: Limits, turn: Spent, conversation: Spent, accounts: Sequence[Account] = (), *, calls: int = 0) -> str:
    """Which budget leaves no room for another model call, or for `calls` more tool calls, in words; empty for none."""
    own = limits.used_up(turn, conversation, calls=calls)
    if own:
        return own
    for account in accounts:
        found = account.bounds.used_up(account.spent, calls=calls)
        if found:
            return f"the {_NAMES[account.kind]}'s budget {found} is used up"
    return ""


def needs_price(limits: Limits, request: TurnRequest) -> bool:
    """Whether the cost of a turn's model calls is bounded, by its own limits or by somebody above."""
    return limits.needs_price or any(account.bounds.max_cost is not None for account in accounts_of(request))
