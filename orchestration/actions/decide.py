"""Decide: record a human's answer to an approval. A decision task then carries it out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestration.actions.expire import expire
from orchestration.actions.pass_on import pass_on
from orchestration.actions.refuse import bell, settled_frames
from orchestration.core.approval import Approval, ApprovalState, Decision, as_api, same_json, settle
from orchestration.core.audit import AuditEvent, audit_entry, decided_of
from orchestration.core.call import CallRecord
from orchestration.core.errors import ApprovalCancelled
from orchestration.core.principal import Principal, Scope
from orchestration.core.safe_json import clean, clean_text
from orchestration.state.approvals import Change, Only
from orchestration.wiring import Ports

#: Characters of a note that are kept.
MAX_NOTE_CHARS = 10_000


def decide(
    ports: Ports,
    principal: Principal,
    approval_id: str,
    approved: bool,
    arguments: dict[str, Any] | None = None,
    note: str | None = None,
    source: str = "",
    link: str = "",
) -> dict[str, Any]:
    """Record the decision and ring the bell for it; returns the approval in the API's shape, settled unless its quorum wants more.

    Once this returns the decision is stored and will be carried out, whatever dies. See `core.approval.settle` for what is
    raised; NotFound when there is no such approval of the principal's tenant.

    Args:
        source: from where it came, for the audit stream.
        link: the decision link that it came through.
    """
    principal.require(Scope.APPROVALS_DECIDE)
    edited = clean(arguments) if arguments is not None else None
    decision = Decision(principal, approved, edited, clean_text(note or "")[:MAX_NOTE_CHARS], source, link)
    while True:
        before = ports.approvals.get(principal.tenant, approval_id)
        after = settle(before, decision)
        if after is before:
            return as_api(before)
        settled = after.state is not ApprovalState.PENDING
        frames, result = settled_frames(after) if settled else ([], "")
        change = Change(
            after,
            audit_entry(AuditEvent.DECIDED, before, by=principal.sub, source=source, decided=decided_of(after), shown=True),
            frames=frames,
            only=Only.IN_TIME,
            decision=after.decisions[-1],
            result=result,
            ends_call=settled,
            call=_edited(ports, before, after) if settled else None,
            ring=bell(ports, before) if settled else {},
        )
        recorded = ports.approvals.record(before, change)
        if recorded.why == "ok":
            pass_on(ports, recorded.sends)
            return as_api(ports.approvals.get(principal.tenant, approval_id))
        if recorded.why == "expired":
            expire(ports, principal.tenant, approval_id)  # whoever sweeps has not come yet
        elif recorded.why == "ended":
            raise ApprovalCancelled(f"{before.told}: its turn has ended; the call did not run and will not")


def _edited(ports: Ports, before: Approval, after: Approval) -> CallRecord | None:
    """The call with the arguments that a human put in place of the model's: those are what the conversation tells from then on."""
    if after.approved_arguments is None or same_json(after.approved_arguments, before.arguments):
        return None
    record = ports.conversations.call_record(before.step)
    return replace(record, arguments=after.approved_arguments) if record is not None else None
