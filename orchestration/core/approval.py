"""An approval: the request that a human decide about one tool call, and what a decision makes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from orchestration.core.errors import AlreadyDecided, ApprovalCancelled, ApprovalExpired, ArgumentsInvalid, Forbidden
from orchestration.core.loop import schema_faults
from orchestration.core.principal import Principal, Scope
from orchestration.core.times import rfc3339


class ApprovalState(StrEnum):
    """Where an approval stands. The last four are ends and never change."""

    PENDING = "pending"  #: a human is asked
    HELD = "held"  #: nobody decided in time, and its gate keeps it until somebody asks again
    APPROVED = "approved"  #: the call may run, with the approved arguments
    DENIED = "denied"  #: the call does not run
    EXPIRED = "expired"  #: nobody decided in time; the call does not run
    CANCELLED = "cancelled"  #: its turn or call was cancelled; the call does not run


@dataclass(frozen=True, slots=True)
class Approval:
    """One approval as recorded. Times are epoch milliseconds of the store; 0 stands for none."""

    approval_id: str
    tenant: str
    turn_id: str
    conversation_id: str
    call_id: str
    round: int
    index: int
    agent: str
    tool: str
    prefix: str
    arguments: dict[str, Any]
    schema: dict[str, Any]
    reason: str
    roles: tuple[str, ...]
    submitted_by: str
    state: ApprovalState = ApprovalState.PENDING
    requested_at: int = 0
    expires_at: int = 0
    decided_at: int = 0
    decided_by: str = ""
    note: str = ""
    quorum: int = 1
    decisions: tuple[dict[str, Any], ...] = ()
    approved_arguments: dict[str, Any] | None = None
    version: str = "0"


@dataclass(frozen=True, slots=True)
class Decision:
    """An answer to an approval: yes or no, perhaps with other arguments, perhaps with a note that the model reads after a no."""

    by: Principal
    approved: bool
    arguments: dict[str, Any] | None = None
    note: str = ""
    source: str = ""


def settle(approval: Approval, decision: Decision) -> Approval:
    """`approval` as `decision` leaves it; the same decision by the same principal changes nothing and returns it as it is.

    Raises:
        Forbidden: the principal lacks the scope, or every role that the gate names.
        AlreadyDecided: somebody decided otherwise before; carries the settled approval.
        ApprovalExpired, ApprovalCancelled: there is nothing to decide any more.
        ArgumentsInvalid: the edited arguments break the tool's schema; nothing is decided.
    """
    decision.by.require(Scope.APPROVALS_DECIDE)
    if not decision.by.has_role(approval.roles):
        raise Forbidden(f"approval {approval.approval_id} needs one of the roles {', '.join(approval.roles)}")
    wanted = ApprovalState.APPROVED if decision.approved else ApprovalState.DENIED
    if approval.state is ApprovalState.EXPIRED:
        raise ApprovalExpired(f"approval {approval.approval_id} for {approval.prefix} expired; the call did not run and will not")
    if approval.state is ApprovalState.CANCELLED:
        raise ApprovalCancelled(f"approval {approval.approval_id} for {approval.prefix} was cancelled; the call did not run and will not")
    runs = decision.arguments if decision.arguments is not None else approval.arguments
    if approval.state is not ApprovalState.PENDING and approval.state is not ApprovalState.HELD:
        same = approval.state is wanted and approval.decided_by == decision.by.sub
        if same and (not decision.approved or runs == approval.approved_arguments):
            return approval
        raise AlreadyDecided(f"approval {approval.approval_id} was {approval.state} by {approval.decided_by}", as_api(approval))
    if decision.approved and decision.arguments is not None:
        faults = schema_faults(approval.schema, decision.arguments)
        if faults:
            raise ArgumentsInvalid(f"the edited arguments break the schema of {approval.prefix}; nothing is decided", faults)
    entry = {"by": decision.by.sub, "approved": decision.approved, "note": decision.note}
    return replace(
        approval,
        state=wanted,
        decided_by=decision.by.sub,
        note=decision.note,
        decisions=(*approval.decisions, entry),
        approved_arguments=runs if decision.approved else None,
    )


def as_api(approval: Approval) -> dict[str, Any]:
    """The approval in the API's shape."""
    return {
        "approval_id": approval.approval_id,
        "state": str(approval.state),
        "turn_id": approval.turn_id,
        "conversation_id": approval.conversation_id,
        "call_id": approval.call_id,
        "agent": approval.agent,
        "tool": approval.tool,
        "prefix": approval.prefix,
        "arguments": approval.approved_arguments if approval.approved_arguments is not None else approval.arguments,
        "schema": approval.schema,
        "reason": approval.reason,
        "roles": list(approval.roles),
        "requested_at": rfc3339(approval.requested_at),
        "expires_at": rfc3339(approval.expires_at),
        "quorum": approval.quorum,
        "decisions": [entry | {"at": rfc3339(entry.get("at") or approval.decided_at)} for entry in approval.decisions],
        "escalated_from": None,
        "decided_by": approval.decided_by or None,
        "decided_at": rfc3339(approval.decided_at),
        "note": approval.note or None,
    }
