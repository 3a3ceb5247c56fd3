"""The audit stream's entries: what was asked of humans, what they decided, and what ran. Append-only; each entry stands for itself.

An entry's number and time are given when it is stored. `ran` entries are put together where a call's result is recorded
(`state/lua/library/approvals.lua`), in the same form.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

from orchestration.core.approval import Approval
from orchestration.core.safe_json import dumps
from orchestration.core.times import rfc3339


class AuditEvent(StrEnum):
    """What an entry tells."""

    REQUESTED = "requested"  #: a human is asked
    REMINDED = "reminded"  #: a human was reminded
    DECIDED = "decided"  #: somebody said yes or no; `decided.state` says what that made of the approval
    EXPIRED = "expired"  #: nobody decided in time; the call does not run
    ESCALATED = "escalated"  #: nobody decided in time; others are asked
    HELD = "held"  #: nobody decided in time; the request is kept
    REOPENED = "reopened"  #: a held request is asked again
    CANCELLED = "cancelled"  #: the call or its turn was cancelled
    LINKED = "linked"  #: a decision link was made
    RAN = "ran"  #: the approved call was carried out, with what came of it
    NOT_RUN = "not_run"  #: the approved call was refused before it was asked


def audit_entry(
    event: AuditEvent, approval: Approval, *, by: str = "", source: str = "", decided: dict[str, Any] | None = None, shown: bool = False
) -> str:
    """One entry as JSON text, without the number and time that it gets when it is stored.

    Args:
        by: the principal's `sub`; empty for a deadline.
        source: from where it came.
        shown: whether a human was shown the call on this occasion, so that the entry holds what was shown.
    """
    return dumps(
        {
            "event": str(event),
            "by": by or None,
            "from": source or None,
            "approval_id": approval.approval_id,
            "turn_id": approval.turn_id,
            "shown": shown_of(approval) if shown else None,
            "decided": decided,
            "ran": None,
        }
    )


def shown_of(approval: Approval) -> dict[str, Any]:
    """What a human is shown of the call."""
    return {
        "tool": approval.tool,
        "prefix": approval.prefix,
        "arguments": approval.arguments,
        "reason": approval.gate.reason,
        "roles": list(approval.gate.roles),
        "expires_at": rfc3339(approval.expires_at),
    }


def decided_of(approval: Approval) -> dict[str, Any]:
    """What the last decision of `approval` was, and what it made of it."""
    last = approval.decisions[-1]
    runs = approval.approved_arguments if last["approved"] else None
    return {"approved": last["approved"], "arguments": runs, "note": last["note"] or None, "state": str(approval.state)}


def audit_as_api(seq: int, text: str) -> dict[str, Any]:
    """A stored entry in the API's shape, from its number (the store's time in microseconds, or one above the last) and its text."""
    return {"seq": seq, "ts": rfc3339(seq // 1000), **json.loads(text)}
