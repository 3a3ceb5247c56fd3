"""Expire: what happens when nobody decided in time is the gate's choice; and the reminder before it."""

from __future__ import annotations

from dataclasses import replace

from orchestration.actions.cancel import end_now
from orchestration.actions.refuse import expire_approval
from orchestration.core.approval import Approval, ApprovalState, asked_again, request_frame
from orchestration.core.audit import AuditEvent, audit_entry
from orchestration.core.errors import NotFound
from orchestration.core.frames import FrameKind, frame
from orchestration.core.gate import OnExpiry
from orchestration.core.outbound import OutboundEvent
from orchestration.core.turn import StopReason
from orchestration.state.approvals import Change, Only, told
from orchestration.wiring import Ports

#: Who let an approval expire, in the audit stream.
SOURCE = "deadline"


def expire(ports: Ports, tenant: str, approval_id: str) -> None:
    """Do what the gate says of an approval whose time is up. Nothing happens when it is settled, or has time left; safe to repeat.

    Raises:
        NotFound: there is no such approval.
    """
    while True:
        before = ports.approvals.get(tenant, approval_id)
        if before.state is not ApprovalState.PENDING or not before.expires_at:
            return
        match before.gate.on_expiry:
            case OnExpiry.END_TURN:
                _end_turn(ports, before)
                return
            case OnExpiry.HOLD:
                change = _held(before)
            case OnExpiry.ESCALATE:
                escalated = _escalated(ports, before)
                if escalated is None:
                    return
                change = escalated
            case _:
                expire_approval(ports, before)
                return
        if ports.approvals.record(before, change, hooked=is_hooked(ports)).why != "stale":
            return


def remind(ports: Ports, tenant: str, approval_id: str) -> None:
    """Remind watchers and the callback of an approval that nobody decided yet; once.

    Raises:
        NotFound: there is no such approval.
    """
    while True:
        before = ports.approvals.get(tenant, approval_id)
        if before.state is not ApprovalState.PENDING:
            return
        change = Change(
            before,
            audit_entry(AuditEvent.REMINDED, before, source=SOURCE, shown=True),
            frames=[request_frame(before, reminder=True)],
            only=Only.REMINDER,
            tell=told(before, OutboundEvent.APPROVAL_REMINDER, hooked=False),
        )
        if ports.approvals.record(before, change).why != "stale":
            return


def is_hooked(ports: Ports) -> bool:
    """Whether the user's module has a hook that is to hear of requests."""
    return ports.project.on_approval_request is not None


def _end_turn(ports: Ports, before: Approval) -> None:
    due = f"expire:{before.tenant}/{before.approval_id}"
    detail = f"nobody decided {before.told} in time; the call did not run"
    try:
        end_now(
            ports,
            before.tenant,
            before.turn_id,
            StopReason.APPROVAL_EXPIRED,
            code="approval_expired",
            detail=detail,
            due=due,
            expired=before.approval_id,
        )
    except NotFound:
        expire_approval(ports, before)


def _held(before: Approval) -> Change:
    after = replace(before, state=ApprovalState.HELD, expires_at=0)
    return Change(
        after,
        audit_entry(AuditEvent.HELD, before, source=SOURCE),
        frames=[request_frame(after, state=str(ApprovalState.HELD))],
        only=Only.OVERDUE,
    )


def _escalated(ports: Ports, before: Approval) -> Change | None:
    record = ports.conversations.call_record(before.step)
    if record is None:
        expire_approval(ports, before)
        return None
    instead = asked_again(before, ports.approvals.now_ms())
    after = replace(before, state=ApprovalState.EXPIRED, escalated_to=instead.approval_id)
    about = {"approval_id": before.approval_id, "tool_call_id": before.call_id, "name": before.tool}
    note = f"not decided in time; others are asked as {instead.approval_id}"
    return Change(
        after,
        audit_entry(AuditEvent.ESCALATED, before, source=SOURCE),
        frames=[
            frame(FrameKind.APPROVAL_DECISION, before.turn_id, before.round, **about, note=note, error=True),
            request_frame(instead),
        ],
        only=Only.OVERDUE,
        instead=instead,
        call=replace(record, approval_id=instead.approval_id, gate=instead.gate),
    )
