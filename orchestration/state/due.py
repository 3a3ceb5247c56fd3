"""What is due: which entries still are, and taking handled ones out. One that was moved meanwhile stays, whoever handled its old time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from orchestration.state.store import Store, translated

#: The sorted set of everything that is due at some time.
DUE = "tm:due"


class Due:
    """Due entries of all tenants, as the leader handles them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def still(self, entries: Sequence[str]) -> dict[str, str]:
        """Those of `entries` that are due now, each with its time (ms); one that was moved or taken out meanwhile is left out."""
        if not entries:
            return {}
        with translated():
            pipe = self._store.client.pipeline(transaction=False)
            pipe.time()
            pipe.zmscore(DUE, list(entries))
            (seconds, micros), times = cast("tuple[tuple[int, int], list[float | None]]", tuple(pipe.execute()))
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        return {entry: f"{at:.0f}" for entry, at in zip(entries, times, strict=True) if at is not None and at <= now_ms}

    def done(self, seen: Mapping[str, str]) -> None:
        """Take entries out, each unless it has another time by now than was seen."""
        if seen:
            self._store.run("due", "", *(part for pair in seen.items() for part in pair))

    def later(self, entry: str, seen_at: str, pause_ms: int) -> None:
        """Make an entry due again after a pause, unless it has another time by now than `seen_at`."""
        self._store.run("due", pause_ms, entry, seen_at)
