"""What came of one attempt to tell the outside something."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Told:
    """An attempt's outcome. An empty `code` says that it arrived; else it says what went wrong, without anything that was sent.

    Args:
        for_good: trying again does not help.
        asked_for_s: the pause that the other side asked for, in seconds.
    """

    code: str = ""
    for_good: bool = False
    asked_for_s: float = 0.0
