"""What is known at the end of a chaos run, and a fault that was found in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tests.chaos.receiver import Call
from tests.chaos.record import Record
from tests.chaos.workload import Submission, scripts


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that must not be, and the turn that shows it (empty where no turn does)."""

    what: str
    turn_id: str = ""


@dataclass(frozen=True)
class Evidence:
    """All that is known at the end.

    Args:
        turns: every turn by id, as the API shows it; those that nobody knows of by name, and those of nested agents, included.
        names: what each turn's input calls itself.
        parents: for each turn of a nested agent, the turn that asked for it.
        histories: each conversation's history, as the API shows it.
        frames: each conversation's stored frames: number, turn, frame.
        effects: how often each effect happened.
        model_faults: what the model found wrong with the messages that it was shown.
        open_turns: turns that were waited for in vain; little else can be said of them.
        calls: what the receiver of callbacks was told, in that order.
    """

    record: Record
    turns: dict[str, dict[str, Any]]
    names: dict[str, str]
    parents: dict[str, str]
    histories: dict[str, list[dict[str, Any]]]
    frames: dict[str, list[tuple[int, str, dict[str, Any]]]]
    effects: Counter[str]
    model_faults: list[str]
    open_turns: list[str]
    calls: list[Call]

    @cached_property
    def submissions(self) -> dict[str, Submission]:
        """What was submitted, by name."""
        return {submission.name: submission for _, submission in self.record.sent}

    @cached_property
    def scripts(self) -> dict[str, dict[str, Any]]:
        """What models were told to do, by name, nested agents included."""
        return {script["name"]: script for _, submission in self.record.sent for script in scripts(submission.script)}

    def submission_of(self, turn_id: str) -> Submission | None:
        """What a turn was submitted as; None for one of a nested agent, or that nobody submitted."""
        return self.submissions.get(self.names[turn_id])
