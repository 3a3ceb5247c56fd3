"""Queries that ask for a call which runs already, here or at another replica: they wait for its answer without holding a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from orchestration.core.errors import StoreUnavailable
from orchestration.core.tool_record import Claim, ClaimState, RecordKey, ToolRecords

log = logging.getLogger(__name__)

#: How often the records of waiting repeats are looked at, in seconds; one round trip for all of them.
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Waiting:
    """One repeat: `settle` gets what its record became, None when nobody waits for it any more (`until`, monotonic seconds)."""

    call: RecordKey
    until: float
    settle: Callable[[Claim | None], None]


class Repeats:
    """The waiting repeats of one host. Its thread lives while there are some."""

    def __init__(self, records: ToolRecords) -> None:
        self._records = records
        self._lock = threading.Lock()
        self._waiting: list[Waiting] = []
        self._looking = False

    def wait(self, waiting: Waiting) -> None:
        """Settle `waiting` once its record is more than running."""
        with self._lock:
            self._waiting.append(waiting)
            if self._looking:
                return
            self._looking = True
        threading.Thread(target=self._look, name="tool-repeats", daemon=True).start()

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                waiting = list(self._waiting)
                if not waiting:
                    self._looking = False
                    return
            settled = self._settled(waiting)
            gone = {id(one) for one, _ in settled}
            with self._lock:
                self._waiting = [one for one in self._waiting if id(one) not in gone]
            for one, claim in settled:
                try:
                    one.settle(claim)
                except Exception:
                    log.exception("a repeated query could not be settled")

    def _settled(self, waiting: list[Waiting]) -> list[tuple[Waiting, Claim | None]]:
        now = time.monotonic()
        try:
            claims: list[Claim] = self._records.look([one.call for one in waiting])
        except StoreUnavailable:
            claims = [Claim(ClaimState.RUNNING)] * len(waiting)
        except Exception:  # this thread is the only one that will ever answer them
            log.exception("the records of repeated queries could not be read")
            claims = [Claim(ClaimState.RUNNING)] * len(waiting)
        settled: list[tuple[Waiting, Claim | None]] = []
        for one, claim in zip(waiting, claims, strict=True):
            if claim.state is not ClaimState.RUNNING:
                settled.append((one, claim))
            elif now >= one.until:
                settled.append((one, None))
        return settled
