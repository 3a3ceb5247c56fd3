"""What a tool host must remember so that a repeated query has no second effect: the port, and what a claim can find.

The adapter is `orchestration/state/tool_records.py`; the host that uses it knows only what is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class ClaimState(StrEnum):
    """What a claim of (tenant, tool, idempotency key) found."""

    STARTED = "started"  #: nobody had it; it is ours to run
    RUNNING = "running"  #: a living host runs it
    DONE = "done"  #: it ended; the answer is there
    UNKNOWN = "unknown"  #: the host that ran it is gone and left no answer
    ABSENT = "absent"  #: nobody had it, and it was not to be started
    MISMATCH = "mismatch"  #: the key was used with other arguments


@dataclass(frozen=True, slots=True)
class RecordKey:
    """One call as a record names it. `arguments_hash` tells a repeat from another call under the same key."""

    tenant: str
    tool: str
    key: str
    arguments_hash: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """What was found; `answer` is the stored reply when it is done."""

    state: ClaimState
    answer: str = ""


class ToolRecords(Protocol):
    """Records shared by all replicas of a tool host. Every method raises StoreUnavailable when the store cannot be reached."""

    def claim(self, call: RecordKey, *, may_start: bool = True) -> Claim:
        """Claim `call` for this host, or learn what became of it; with `may_start=False` only look."""
        ...

    def finish(self, call: RecordKey, answer: str) -> None:
        """Record the answer of a call that this host claimed; the first answer stays."""
        ...

    def release(self, call: RecordKey) -> None:
        """Forget a claim of this host whose call did not run."""
        ...

    def look(self, calls: list[RecordKey]) -> list[Claim]:
        """What became of each of `calls`, in one round trip."""
        ...

    def close(self) -> None:
        """Stop renewing this host's lease. What it still runs will count as unknown."""
        ...
