"""Bounds of a turn and of a conversation, what was spent of them, and when one is reached. Prices come from the settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from orchestration.core.errors import Misconfigured
from orchestration.core.model import Usage

#: Millionths in one unit of the currency in which the settings' prices are.
MICROS = 1_000_000


@dataclass(frozen=True, slots=True)
class Spent:
    """What a turn or a conversation has used so far. `cost_micros` is in millionths of the currency of the prices, `seconds` is the
    age of a conversation."""

    rounds: int = 0
    tool_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_micros: int = 0
    seconds: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Spent)))


#: Nothing was used.
NOTHING = Spent()


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds that add up; None for none.

    Args:
        max_rounds: model calls.
        max_tool_calls: tools asked; calls that the loop answers itself do not count.
        max_input_tokens, max_output_tokens: tokens as the provider counts them.
        max_cost: in the currency of the setting `TURNMILL_PRICES`.
        deadline_s: of a conversation, seconds from its first input after which no more model calls and tools begin.
    """

    max_rounds: int | None = None
    max_tool_calls: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_cost: float | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            _check("Budget", one.name, getattr(self, one.name), least=1 if one.name == "max_rounds" else 0)
        _check_deadline("Budget", self.deadline_s)

    def used_up(self, spent: Spent, *, calls: int = 0) -> str:
        """Which bound leaves no room for another model call, or for `calls` more tool calls, with what was used; empty for none."""
        for name, most, used in (
            ("max_rounds", self.max_rounds, spent.rounds),
            ("max_input_tokens", self.max_input_tokens, spent.input_tokens),
            ("max_output_tokens", self.max_output_tokens, spent.output_tokens),
        ):
            if most is not None and used >= most:
                return f"{name}={most} ({used} used)"
        if self.max_cost is not None and spent.cost_micros >= self.max_cost * MICROS:
            return f"max_cost={self.max_cost:g} ({spent.cost_micros / MICROS:g} used)"
        if self.deadline_s is not None and spent.seconds >= self.deadline_s:
            return f"deadline_s={self.deadline_s:g} ({spent.seconds:.0f} s old)"
        if self.max_tool_calls is not None and calls and spent.tool_calls + calls > self.max_tool_calls:
            return f"max_tool_calls={self.max_tool_calls} ({spent.tool_calls} used, {calls} more asked for)"
        return ""

    def as_json(self) -> dict[str, Any]:
        """A JSON object of the bounds that there are; `Budget(**…)` takes it back."""
        return {one.name: most for one in fields(self) if (most := getattr(self, one.name)) is not None}


@dataclass(frozen=True, slots=True)
class Limits:
    """How far one turn may go, and with `conversation` all turns of a conversation together.

    Args:
        max_rounds: model calls; the calls that the last one asks for are not run. None for no bound.
        max_tool_result_chars: characters of one tool result in the copy that the model sees; None for no bound.
        deadline_s: seconds from the turn's start to its end; None for none.
        max_attempts: how often one step is tried before its fault ends the turn.
        max_tool_calls, max_input_tokens, max_output_tokens, max_cost: see `Budget`; used up, the turn ends with `budget`.
        max_handoffs: how often one turn may pass from agent to agent.
        conversation: what all turns of a conversation may use together.

    Raises:
        Misconfigured: a bound that cannot be one; names it.
    """

    max_rounds: int | None = 20
    max_tool_result_chars: int | None = 8_000
    deadline_s: float | None = None
    max_attempts: int = 5
    max_tool_calls: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_cost: float | None = None
    max_handoffs: int = 8
    conversation: Budget | None = None

    def __post_init__(self) -> None:
        _check("Limits", "max_rounds", self.max_rounds, least=1)
        if isinstance(self.max_attempts, bool) or not isinstance(self.max_attempts, int) or self.max_attempts < 1:
            raise Misconfigured(f"Limits(max_attempts={self.max_attempts!r}): at least 1")
        _check_deadline("Limits", self.deadline_s)
        for name in ("max_tool_result_chars", "max_tool_calls", "max_input_tokens", "max_output_tokens", "max_cost", "max_handoffs"):
            _check("Limits", name, getattr(self, name), least=0)

    @property
    def budget(self) -> Budget:
        """The bounds of the turn that add up. `max_rounds` is not among them: what happens there is the agent's `on_round_limit`."""
        return Budget(None, self.max_tool_calls, self.max_input_tokens, self.max_output_tokens, self.max_cost)

    def used_up(self, turn: Spent, conversation: Spent, *, calls: int = 0) -> str:
        """Which budget leaves no room for another model call, or for `calls` more tool calls, in words; empty for none."""
        found = self.budget.used_up(turn, calls=calls)
        if found:
            return f"the turn's budget {found} is used up"
        if self.conversation is not None and (found := self.conversation.used_up(conversation, calls=calls)):
            return f"the conversation's budget {found} is used up"
        return ""

    @property
    def needs_price(self) -> bool:
        """Whether a bound on the cost is set."""
        return self.max_cost is not None or (self.conversation is not None and self.conversation.max_cost is not None)


@dataclass(frozen=True, slots=True)
class Price:
    """What a model costs for a million tokens; `cached` for input tokens that the provider had at hand, by default as `input`."""

    input: float
    output: float
    cached: float | None = None

    def cost_micros(self, usage: Usage) -> int:
        """What one call cost, in millionths, rounded up."""
        cached = min(usage.cached_tokens, usage.input_tokens)
        fresh = usage.input_tokens - cached
        cost = fresh * self.input + cached * (self.input if self.cached is None else self.cached) + usage.output_tokens * self.output
        return math.ceil(cost - 1e-9)


def price_of(prices: Mapping[str, Price], names: Sequence[str]) -> Price | None:
    """The first price that one of `names` has; the entry `*` is for every other model."""
    for name in (*names, "*"):
        if name in prices:
            return prices[name]
    return None


def usage_shown(usage: Usage, cost_micros: int = 0) -> dict[str, int | float]:
    """The tokens of a turn as readers and watchers are told; with their cost, where its models have prices."""
    tokens: dict[str, int | float] = {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
    return tokens | ({"cost": cost_micros / MICROS} if cost_micros else {})


def _check_deadline(what: str, seconds: Any) -> None:
    if seconds is not None and not seconds > 0:
        raise Misconfigured(f"{what}(deadline_s={seconds!r}): a positive number of seconds, or None")


def _check(what: str, name: str, value: Any, *, least: int) -> None:
    if value is None:
        return
    kinds = (int, float) if name in ("max_cost", "deadline_s") else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or value < least:
        raise Misconfigured(f"{what}({name}={value!r}): {'a number' if float in kinds else 'a whole number'} of at least {least}, or None")
