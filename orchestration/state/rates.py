"""How much one principal may ask: a token bucket in Redis, shared by all gateways. `rate.lua` keeps it; refusing is for others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from orchestration.state.store import Store


@dataclass(frozen=True, slots=True)
class Rate:
    """What came of one request. `limit` is the size of the bucket, `remaining` what is in it; times are in seconds."""

    allowed: bool
    limit: int
    remaining: int
    full_in_s: float
    retry_after_s: float
    window_s: float


class Rates:
    """The buckets of all principals.

    Args:
        per_s: requests per second that flow into each bucket; 0 for no bound at all.
        burst: how many it holds.
    """

    def __init__(self, store: Store, *, per_s: float, burst: int) -> None:
        self._store = store
        self._per_s = per_s
        self._burst = burst

    def take(self, tenant: str, sub: str, count: int = 1) -> Rate | None:
        """Take `count` requests out of a principal's bucket, if it has them; None where there is no bound. Raises StoreUnavailable."""
        if not self._per_s:
            return None
        who = hashlib.sha256(sub.encode("utf-8", "replace")).hexdigest()[:32]
        interval_us = max(1, round(1_000_000 / self._per_s))
        answer = self._store.run("rate", tenant, who, interval_us, self._burst, count)
        allowed, remaining, full_us, retry_us = (int(value) for value in answer)
        return Rate(bool(allowed), self._burst, remaining, full_us / 1e6, retry_us / 1e6, self._burst / self._per_s)
