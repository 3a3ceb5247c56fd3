"""Bounds of a turn, and when one is reached."""

from __future__ import annotations

from dataclasses import dataclass

from orchestration.core.errors import Misconfigured


@dataclass(frozen=True, slots=True)
class Limits:
    """How far one turn may go.

    Args:
        max_rounds: model calls; at the last one the calls that it asks for are not run.
        max_tool_result_chars: characters of one tool result in the copy that the model sees; None for no bound.
        deadline_s: seconds from the turn's start to its end; None for none.
        max_attempts: how often one step is tried before its fault ends the turn.
    """

    max_rounds: int = 20
    max_tool_result_chars: int | None = 8_000
    deadline_s: float | None = None
    max_attempts: int = 5

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise Misconfigured(f"Limits(max_rounds={self.max_rounds}): at least 1")
        if self.max_attempts < 1:
            raise Misconfigured(f"Limits(max_attempts={self.max_attempts}): at least 1")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise Misconfigured(f"Limits(deadline_s={self.deadline_s!r}): a positive number of seconds, or None")
