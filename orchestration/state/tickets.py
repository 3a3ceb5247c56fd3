"""Tickets: what a browser shows in place of its token where it cannot set a header. Each is good once, for a minute.

Keys: `tm:ticket:{SHA-256 of a ticket}`, a string with the caller as JSON that expires by itself. The ticket itself is not kept.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, cast

from orchestration.core.times import rfc3339
from orchestration.state.store import Store, translated

#: Seconds for which a ticket is good.
TICKET_S = 60

#: What a ticket begins with, so that one is told from a key.
PREFIX = "tkt_"

#: Longer text is no ticket of ours, in characters.
MAX_CHARS = 100


class Tickets:
    """Makes tickets and takes them back."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def issue(self, caller: str) -> tuple[str, str]:
        """A new ticket for a caller (JSON text), and until when it is good (RFC 3339). Raises StoreUnavailable."""
        ticket = PREFIX + secrets.token_urlsafe(24)
        with translated():
            pipe = self._store.client.pipeline(transaction=False)
            pipe.set(_key(ticket), caller, ex=TICKET_S)
            pipe.time()
            _, (seconds, micros) = cast("tuple[Any, tuple[int, int]]", tuple(pipe.execute()))
        return ticket, rfc3339((seconds + TICKET_S) * 1000 + micros // 1000) or ""

    def redeem(self, ticket: str) -> str | None:
        """Whose ticket this is (JSON text); None for one that is unknown, used or too old. Whatever the answer, it is used up now.

        Raises:
            StoreUnavailable: it may be used up without an answer.
        """
        if not ticket.startswith(PREFIX) or len(ticket) > MAX_CHARS:
            return None
        with translated():
            return cast("str | None", self._store.client.getdel(_key(ticket)))


def _key(ticket: str) -> str:
    return "tm:ticket:" + hashlib.sha256(ticket.encode("utf-8", "replace")).hexdigest()
