"""Times as the API writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(ms: int | float | None) -> str | None:
    """Epoch milliseconds as RFC 3339 in UTC; None for no time (None or 0)."""
    if not ms:
        return None
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
