"""Secrets that a deployment makes for itself: random, made once when first needed, the same for all processes.

They are as safe as the Redis that holds the journal; those that an operator sets are in the settings.
"""

from __future__ import annotations

import secrets
from typing import cast

from orchestration.state.store import Store, translated


class Secrets:
    """Secrets by name. Safe for threads; a name's secret never changes while it is there."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def get(self, name: str) -> str:
        """The secret of this name: 64 hexadecimal digits."""
        key = f"tm:secret:{name}"
        with translated():
            client = self._store.client
            found = cast("str | None", client.get(key))
            if found is None:
                client.set(key, secrets.token_hex(32), nx=True)
                found = cast(str, client.get(key))
        return found
