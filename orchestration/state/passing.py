"""Conversations that are not kept: they begin with a history that somebody brings along, and go an hour after their turn has ended."""

from __future__ import annotations

from collections.abc import Sequence

from orchestration.core.conversation import Entry
from orchestration.core.safe_json import clean, dumps
from orchestration.state.store import Store

#: Seconds for which such a conversation and its turn can still be read.
KEPT_S = 3600


def begin_passing(store: Store, tenant: str, conversation_id: str, entries: Sequence[Entry]) -> None:
    """Begin a new conversation with `entries`; it is gone soon unless a turn is submitted to it. A second call changes nothing.

    Raises:
        StoreUnavailable: Redis does not answer.
    """
    store.run("begin_passing", tenant, conversation_id, KEPT_S, *(dumps(clean(entry)) for entry in entries))
