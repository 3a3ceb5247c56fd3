"""Rate limits of the gateway: how much a principal may ask, refused with 429 beyond it, and told to it in headers."""

from __future__ import annotations

import logging
import math

from starlette.types import Scope

from orchestration.core.errors import RateLimited, StoreUnavailable
from orchestration.identity.callers import Caller
from orchestration.state.rates import Rate, Rates

log = logging.getLogger(__name__)

#: Where a request's scope keeps the headers that its answer is to have.
_TOLD = "turnmill.rate"


class Brake:
    """Takes requests out of their principals' buckets. Without an answer of the store it lets them pass: nothing else works then either."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates

    def take(self, caller: Caller, scope: Scope | None = None) -> None:
        """Count one request of this caller's principal; `scope` learns what to tell it. On trust, on this machine alone, nobody is counted.

        Raises:
            RateLimited: it asked too much; says when to ask again. Nothing else happened.
        """
        if caller.on_trust:
            return
        principal = caller.principal
        try:
            rate = self._rates.take(principal.tenant, principal.sub)
        except StoreUnavailable:
            log.warning("rate limits are off while the store does not answer")
            return
        if rate is None:
            return
        if scope is not None:
            scope.setdefault(_TOLD, {}).update(_headers(rate))
        if not rate.allowed:
            raise RateLimited(
                f"{principal.sub!r} may send {rate.limit / rate.window_s:g} requests a second, {rate.limit} at once; "
                f"ask again in {max(1, math.ceil(rate.retry_after_s))} s",
                rate.retry_after_s,
            )


def prepare(scope: Scope) -> dict[str, str]:
    """Give a request's scope a place for the headers that `take` fills in; returns it."""
    told: dict[str, str] = scope.setdefault(_TOLD, {})
    return told


def _headers(rate: Rate) -> dict[str, str]:
    return {
        "RateLimit-Limit": str(rate.limit),
        "RateLimit-Remaining": str(max(0, rate.remaining)),
        "RateLimit-Reset": str(math.ceil(rate.full_in_s)),
        "RateLimit-Policy": f"{rate.limit};w={max(1, math.ceil(rate.window_s))}",
    }
