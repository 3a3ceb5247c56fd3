"""The outbox: which steps are committed but not known to be sent, sent but not claimed, or due later.

A commit puts what follows into the outbox; whoever made it sends the message and says so with its next call to Redis; the
step's own claim takes it out. What is left behind at any point is found by `sweep`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from orchestration.core.ids import StepId
from orchestration.state.store import Store, texts


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What one sweep found."""

    unsent: list[StepId]
    due: list[str]
    silent: list[tuple[str, str]]
    deposed: list[str]
    lost: list[StepId]
    doubtful: list[StepId]


class Outbox:
    """Sends that are to be confirmed, and the sweep for those that were not. Safe for threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._sent: list[str] = []

    def sent(self, steps: Iterable[StepId]) -> None:
        """Remember that these were sent; Redis hears of it with the next script of this process."""
        with self._lock:
            self._sent.extend(str(step) for step in steps)

    @property
    def unconfirmed(self) -> bool:
        """Whether something was sent of which Redis has not heard."""
        return bool(self._sent)

    def take_confirmations(self) -> str:
        """What is to be confirmed, as the JSON list that scripts take."""
        if not self._sent:
            return "[]"
        with self._lock:
            taken, self._sent = self._sent, []
        return json.dumps(taken)

    def sweep(self, *, unsent_after_ms: int = 700, lost_after_ms: int | None = None, most: int = 200) -> Leftovers:
        """One look for everything left behind; changes nothing.

        Args:
            unsent_after_ms: age from which a committed step counts as never passed on.
            lost_after_ms: age from which a step that was sent but not claimed may count as lost; by default the setting.
            most: how many of each kind are returned.
        """
        lost_after = int(self._store.settings.lost_after_s * 1000) if lost_after_ms is None else lost_after_ms
        unsent, due, silent, deposed, lost, doubtful = self._store.run("sweep", unsent_after_ms, most, lost_after)
        return Leftovers(
            [StepId.parse(text) for text in unsent],
            texts(due),
            list(zip(silent[::2], silent[1::2], strict=True)),
            texts(deposed),
            [StepId.parse(text) for text in lost],
            [StepId.parse(text) for text in doubtful],
        )

    def resend(self, steps: Iterable[StepId]) -> list[StepId]:
        """Put lost steps back into the outbox; those that are still unclaimed are returned and must be sent."""
        names = [str(step) for step in steps]
        return [StepId.parse(text) for text in self._store.run("resend", *names)] if names else []

    def promote(self, step: StepId) -> list[StepId]:
        """Make a step whose pause is over ready again; what is returned must be sent."""
        return [StepId.parse(text) for text in self._store.run("promote", str(step))]
