"""Reopen: have humans asked again about an approval that its gate holds because nobody decided in time."""

from __future__ import annotations

from typing import Any

from orchestration.actions.expire import is_hooked
from orchestration.core.approval import ApprovalState, as_api, may_decide, reopened, request_frame
from orchestration.core.audit import AuditEvent, audit_entry
from orchestration.core.errors import ApprovalCancelled, Invalid, NotHeld
from orchestration.core.gate import MAX_TIMEOUT_S
from orchestration.core.outbound import OutboundEvent
from orchestration.core.principal import Principal
from orchestration.state.approvals import Change, told
from orchestration.wiring import Ports


def reopen(ports: Ports, principal: Principal, approval_id: str, timeout_s: float | None = None, source: str = "") -> dict[str, Any]:
    """Make a held approval pending again, with a new time to expire; returns it in the API's shape.

    Args:
        timeout_s: seconds until it expires; None means for as long as its gate says.

    Raises:
        NotFound: there is no such approval of the principal's tenant.
        Forbidden: the principal may not decide it.
        NotHeld: it is not held, or not any more.
        Invalid: a time that cannot be.
        ApprovalCancelled: its turn has ended.
    """
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise Invalid("timeout_s does not fit", [{"loc": ["timeout_s"], "msg": "a positive number of seconds, at most ten years"}])
    while True:
        before = ports.approvals.get(principal.tenant, approval_id)
        may_decide(before, principal)
        if before.state is not ApprovalState.HELD:
            raise NotHeld(f"approval {approval_id} is {before.state}, not held")
        after = reopened(before, timeout_s, ports.approvals.now_ms())
        change = Change(
            after,
            audit_entry(AuditEvent.REOPENED, after, by=principal.sub, source=source, shown=True),
            frames=[request_frame(after, reopened=True)],
            tell=told(after, OutboundEvent.APPROVAL_REQUESTED, hooked=is_hooked(ports)),
        )
        recorded = ports.approvals.record(before, change)
        if recorded.why == "ok":
            return as_api(ports.approvals.get(principal.tenant, approval_id))
        if recorded.why == "ended":
            raise ApprovalCancelled(f"{before.told}: its turn has ended; the call did not run and will not")
