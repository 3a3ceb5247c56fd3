"""Refuse: end an undecided approval without a human's answer, because its time is up or its call was cancelled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestration.actions.pass_on import pass_on
from orchestration.core.approval import OPEN, Approval, ApprovalState
from orchestration.core.audit import AuditEvent, audit_entry
from orchestration.core.call import CallState
from orchestration.core.frames import FrameKind, frame
from orchestration.core.ids import StepId, StepKind
from orchestration.core.loop import denial
from orchestration.core.safe_json import dumps
from orchestration.state.approvals import Change, Only
from orchestration.wiring import Ports

#: Which state a call that never ran ends in.
REFUSALS = {
    ApprovalState.DENIED: CallState.DENIED,
    ApprovalState.EXPIRED: CallState.EXPIRED,
    ApprovalState.CANCELLED: CallState.CANCELLED,
}


def cancel_approval(ports: Ports, tenant: str, approval_id: str, *, by: str, source: str = "") -> bool:
    """Settle an undecided approval as cancelled; False when there was nothing to cancel any more."""
    before = ports.approvals.get(tenant, approval_id)
    return _refuse(ports, before, ApprovalState.CANCELLED, AuditEvent.CANCELLED, Only.ALWAYS, by, source)


def expire_approval(ports: Ports, before: Approval) -> bool:
    """Settle an undecided approval whose time is up as expired, as it was read; False when it is settled, or has time left."""
    return _refuse(ports, before, ApprovalState.EXPIRED, AuditEvent.EXPIRED, Only.OVERDUE, "", "deadline")


def _refuse(ports: Ports, before: Approval, state: ApprovalState, event: AuditEvent, only: Only, by: str, source: str) -> bool:
    while before.state in OPEN:
        after = replace(before, state=state, decided_by=by)
        frames, result = settled_frames(after)
        entry = audit_entry(event, before, by=by, source=source)
        change = Change(after, entry, frames=frames, only=only, result=result, ends_call=True, ring=bell(ports, before))
        recorded = ports.approvals.record(before, change)
        if recorded.why == "ok":
            pass_on(ports, recorded.sends)
            return True
        if recorded.why != "stale":
            return False
        before = ports.approvals.get(before.tenant, before.approval_id)
    return False


def bell(ports: Ports, settled: Approval) -> dict[str, tuple[str, str]]:
    """What the script that settles an approval needs to send the decision task itself, where it can."""
    return ports.queue.ring([StepId(settled.tenant, settled.turn_id, settled.round, StepKind.DECIDE, settled.index)])


def settled_frames(settled: Approval) -> tuple[list[str], str]:
    """What watchers are told of a decided call; and, when it does not run, what the model reads (JSON; else empty)."""
    refused = settled.state is not ApprovalState.APPROVED
    fields: dict[str, Any] = {"approval_id": settled.approval_id, "tool_call_id": settled.call_id, "name": settled.tool}
    if settled.note:
        fields["note"] = settled.note
    if not refused:
        fields["arguments"] = settled.approved_arguments
    frames = [frame(FrameKind.APPROVAL_DECISION, settled.turn_id, settled.round, **fields, error=refused)]
    if not refused:
        return frames, ""
    refusal = denial(REFUSALS[settled.state], settled.tool, settled.note)
    about = {"tool_call_id": settled.call_id, "name": settled.tool}
    frames.append(frame(FrameKind.TOOL_RESULT, settled.turn_id, settled.round, **about, content=refusal.content, error=True))
    return frames, dumps(refusal.as_json())
