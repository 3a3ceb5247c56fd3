"""Decide: record a human's answer to an approval, or that there will be none. A decision task then carries it out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestration.actions.pass_on import pass_on
from orchestration.core.approval import Approval, ApprovalState, Decision, as_api, settle
from orchestration.core.call import CallState
from orchestration.core.errors import ApprovalCancelled
from orchestration.core.frames import FrameKind, frame
from orchestration.core.loop import denial
from orchestration.core.principal import Principal, Scope
from orchestration.core.safe_json import clean, clean_text, dumps
from orchestration.wiring import Ports

#: Which state a call that never ran ends in.
REFUSALS = {
    ApprovalState.DENIED: CallState.DENIED,
    ApprovalState.EXPIRED: CallState.EXPIRED,
    ApprovalState.CANCELLED: CallState.CANCELLED,
}


def decide(
    ports: Ports,
    principal: Principal,
    approval_id: str,
    approved: bool,
    arguments: dict[str, Any] | None = None,
    note: str | None = None,
    source: str = "",
) -> dict[str, Any]:
    """Record the decision and ring the bell for it; returns the settled approval in the API's shape.

    Once this returns the decision is stored and will be carried out, whatever dies. See `core.approval.settle` for what is
    raised; NotFound when there is no such approval of the principal's tenant.
    """
    principal.require(Scope.APPROVALS_DECIDE)
    decision = Decision(principal, approved, clean(arguments) if arguments is not None else None, clean_text(note or ""), source)
    while True:
        before = ports.approvals.get(principal.tenant, approval_id)
        after = settle(before, decision)
        if after is before or _record(ports, before, after):
            return as_api(ports.approvals.get(principal.tenant, approval_id))
        if _turn_ended(ports, before):
            raise ApprovalCancelled(f"approval {approval_id}: its turn has ended; the call did not run and will not")


def refuse(ports: Ports, tenant: str, approval_id: str, state: ApprovalState, *, by: str = "", note: str = "") -> bool:
    """Settle an undecided approval as expired or cancelled; False when it had been settled before."""
    while True:
        before = ports.approvals.get(tenant, approval_id)
        if before.state not in (ApprovalState.PENDING, ApprovalState.HELD):
            return False
        if _record(ports, before, _refused(before, state, by, note)):
            return True
        if _turn_ended(ports, before):
            return False


def _refused(before: Approval, state: ApprovalState, by: str, note: str) -> Approval:
    return replace(before, state=state, decided_by=by, note=note)


def _record(ports: Ports, before: Approval, after: Approval) -> bool:
    frames, result = [], ""
    fields: dict[str, Any] = {"approval_id": after.approval_id, "tool_call_id": after.call_id, "name": after.tool}
    if after.note:
        fields["note"] = after.note
    if after.state is ApprovalState.APPROVED:
        fields["arguments"] = after.approved_arguments
    frames.append(frame(FrameKind.APPROVAL_DECISION, after.turn_id, after.round, **fields, error=after.state is not ApprovalState.APPROVED))
    if after.state is not ApprovalState.APPROVED:
        refusal = denial(REFUSALS[after.state], after.tool, after.note)
        result = dumps(refusal.as_json())
        frames.append(
            frame(
                FrameKind.TOOL_RESULT,
                after.turn_id,
                after.round,
                tool_call_id=after.call_id,
                name=after.tool,
                content=refusal.content,
                error=True,
            )
        )
    sends = ports.approvals.record(before, after, frames=frames, verdict=after.state, result=result)
    if sends is None:
        return False
    pass_on(ports, sends)
    return True


def _turn_ended(ports: Ports, approval: Approval) -> bool:
    state = ports.conversations.fields(approval.tenant, approval.turn_id, "state")[0]
    return state is None or state in ("completed", "failed", "cancelled")
