"""What Redis must be like before anything relies on it: no eviction, and an append-only file. Asked when a process starts."""

from __future__ import annotations

import logging

import redis

from orchestration.core.errors import Misconfigured
from orchestration.state.store import Store, translated

log = logging.getLogger("turnmill.store")

#: The only policy under which what Redis acknowledged stays.
POLICY = "noeviction"


def check_store(store: Store, *, warn: bool = True) -> None:
    """Refuse a Redis that may throw away what it acknowledged; warn about one that loses all with its process.

    Args:
        warn: say so in the log where something is not as it should be, or cannot be known. For the first look of a process.

    Raises:
        Misconfigured: its eviction policy is not `noeviction`.
        StoreUnavailable: it does not answer, so nothing is known.
    """
    try:
        with translated():
            info = store.client.info("memory") | store.client.info("persistence")
    except redis.ResponseError as error:
        # A managed service may keep INFO to itself; then its own settings page has to be read.
        if warn:
            log.warning("Redis does not tell its settings (%s): see to it that its eviction policy is %s", type(error).__name__, POLICY)
        return
    policy = info.get("maxmemory_policy", POLICY)
    if policy != POLICY:
        raise Misconfigured(
            f"Redis evicts keys when it is full (maxmemory-policy {policy}): turns and approvals would vanish; set it to {POLICY}"
        )
    if warn and not info.get("aof_enabled", 1):
        log.warning("Redis keeps no append-only file: a restart of it loses turns and approvals; set appendonly yes in production")
