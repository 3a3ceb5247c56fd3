"""Deliveries to the outside in Redis: which attempt is due, who makes it, how it ended. What is told is read when it is told.

A delivery is created by the script that commits its event. While it is open it has an entry in what is due, so that nothing is lost
with a message or a worker.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import cast

from orchestration.core.outbound import Delivery, pause_s
from orchestration.state.store import CLAIM_PATIENCE_S, Store, texts, translated

#: How long an attempt's message may be on its way before it is looked for, in milliseconds.
SENT_MS = 15_000

#: How long an attempt may take before its worker counts as lost, in milliseconds; longer than any attempt takes. Every `LOOK_MS` it is
#: looked whether that worker still has its lease.
ATTEMPT_MS, LOOK_MS = 90_000, 2_000


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt that this process makes. Times are the store's, in ms."""

    tenant: str
    delivery: Delivery
    number: int
    claim: str
    created_ms: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class ToSend:
    """An attempt whose message is to be sent. `waited_ms`: for how long one has been on its way already, 0 for the first."""

    number: int
    waited_ms: int


@dataclass(frozen=True, slots=True)
class DeliveryView:
    """Where a delivery stands: due, sent, running, done or given_up; `code` says what went wrong last."""

    state: str
    attempt: int
    code: str


class Outbound:
    """Deliveries of all tenants; each call names whose."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def to_send(self, tenant: str, name: str) -> ToSend | None:
        """The attempt that a message is to be sent for now, if one is."""
        answer = self._store.run("outbound_send", tenant, name, SENT_MS, LOOK_MS)
        return ToSend(int(answer[0]), int(answer[1])) if answer else None

    def begin(self, tenant: str, delivery: Delivery, number: int, process: str = "") -> Attempt | None:
        """Begin an attempt, which `process` makes; None when it is not to be made (any more)."""
        claim = secrets.token_hex(8)
        place = (tenant, delivery.name, number, claim, ATTEMPT_MS, process, LOOK_MS)
        answer = texts(self._store.insist("outbound_claim", *place, patience_s=CLAIM_PATIENCE_S))
        return Attempt(tenant, delivery, number, claim, int(answer[0]), int(answer[1])) if answer else None

    def delivered(self, attempt: Attempt) -> None:
        """It arrived."""
        self._end(attempt, "done", "")

    def failed(self, attempt: Attempt, code: str, *, for_good: bool = False, asked_for_s: float = 0.0) -> bool:
        """It did not; it is tried again after a pause, unless its time is over or it failed for good. Whether it is tried again."""
        since_s = (attempt.now_ms - attempt.created_ms) / 1000
        pause = None if for_good else pause_s(attempt.number, since_s, asked_for_s)
        if pause is None:
            self._end(attempt, "given_up", code)
            return False
        self._end(attempt, "again", code, round(pause * 1000))
        return True

    def put_off(self, attempt: Attempt, pause_ms: int) -> None:
        """It was not made after all; it does not count."""
        self._end(attempt, "put_off", "busy", pause_ms)

    def look(self, tenant: str, delivery: Delivery) -> DeliveryView | None:
        """Where a delivery stands; None when there is none."""
        with translated():
            found = cast("list[str | None]", self._store.client.hmget(f"tm:{tenant}:out:{delivery.name}", ["state", "attempt", "code"]))
        return DeliveryView(found[0], int(found[1] or 0), found[2] or "") if found[0] is not None else None

    def _end(self, attempt: Attempt, how: str, code: str, pause_ms: int = 0) -> None:
        # without this the attempt would count as under way, and be made again, when its time is over
        self._store.insist("outbound_end", attempt.tenant, attempt.delivery.name, attempt.claim, how, code, pause_ms)
