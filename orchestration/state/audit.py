"""The audit stream in Redis, reading side: one append-only stream a tenant. Entries are written by the scripts that make what they tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from orchestration.state.store import Store, translated

#: Entries that one look for a filter without an index goes through.
MAX_LOOKED_AT = 10_000


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Entries with their numbers, oldest first; `after` is where to go on, 0 at the end."""

    entries: list[tuple[int, str]]
    after: int


class Audit:
    """The audit streams of all tenants; each call names whose."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def page(self, tenant: str, *, after: int = 0, limit: int = 100) -> AuditPage:
        """All entries behind the number `after`, at most `limit`."""
        found = self._range(tenant, f"({after}-0", "+", limit + 1)
        return AuditPage(found[:limit], found[limit - 1][0] if len(found) > limit else 0)

    def numbered(self, tenant: str, numbers: Iterable[int], *, after: int = 0, limit: int = 100) -> AuditPage:
        """The entries of these numbers behind `after`, at most `limit`; those that are no longer kept are left out."""
        wanted = sorted(number for number in set(numbers) if number > after)
        with translated():
            pipe = self._store.client.pipeline(transaction=False)
            for number in wanted[:limit]:
                pipe.xrange(f"tm:{tenant}:audit", f"{number}-0", f"{number}-0")
            found = pipe.execute()
        entries = [_entry(one) for some in found for one in some]
        return AuditPage(entries, wanted[limit - 1] if len(wanted) > limit else 0)

    def search(self, tenant: str, text: str, *, after: int = 0, limit: int = 100) -> AuditPage:
        """At most `limit` entries that contain `text`, of the next `MAX_LOOKED_AT` behind `after`; there may be none yet more follow."""
        looked_at = self._range(tenant, f"({after}-0", "+", MAX_LOOKED_AT)
        entries: list[tuple[int, str]] = []
        for number, entry in looked_at:
            if text in entry:
                entries.append((number, entry))
                if len(entries) == limit:
                    return AuditPage(entries, number)
        return AuditPage(entries, looked_at[-1][0] if len(looked_at) == MAX_LOOKED_AT else 0)

    def _range(self, tenant: str, start: str, end: str, count: int) -> list[tuple[int, str]]:
        with translated():
            found: Any = self._store.client.xrange(f"tm:{tenant}:audit", start, end, count=count)
        return [_entry(one) for one in found]


def _entry(stored: Any) -> tuple[int, str]:
    id_, fields = stored
    return int(str(id_).partition("-")[0]), fields["e"]
