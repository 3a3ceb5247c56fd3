"""An approval: the request that a human decide about one tool call, and what a decision makes of it.

Values in, values out. The clock is the store's: whether there was still time is decided where a change is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from orchestration.core.call import CallRecord
from orchestration.core.errors import AlreadyDecided, ApprovalCancelled, ApprovalExpired, ArgumentsDiffer, ArgumentsInvalid, Forbidden
from orchestration.core.frames import FrameKind, frame
from orchestration.core.gate import Gate
from orchestration.core.ids import StepId, StepKind
from orchestration.core.loop import schema_faults
from orchestration.core.principal import Principal, Scope
from orchestration.core.times import rfc3339
from orchestration.core.turn import TurnRequest


class ApprovalState(StrEnum):
    """Where an approval stands. The last four are ends and never change."""

    PENDING = "pending"  #: a human is asked
    HELD = "held"  #: nobody decided in time, and its gate keeps it until somebody asks again
    APPROVED = "approved"  #: the call may run, with the approved arguments
    DENIED = "denied"  #: the call does not run
    EXPIRED = "expired"  #: nobody decided in time; the call does not run, or others were asked instead
    CANCELLED = "cancelled"  #: its turn or call was cancelled; the call does not run


#: Which state may follow which; `docs/states.md` draws it.
FOLLOWS: dict[ApprovalState, frozenset[ApprovalState]] = {
    ApprovalState.PENDING: frozenset(ApprovalState) - {ApprovalState.PENDING},
    ApprovalState.HELD: frozenset({ApprovalState.PENDING, ApprovalState.CANCELLED}),
    ApprovalState.APPROVED: frozenset(),
    ApprovalState.DENIED: frozenset(),
    ApprovalState.EXPIRED: frozenset(),
    ApprovalState.CANCELLED: frozenset(),
}

#: States in which a human is still waited for.
OPEN = frozenset(state for state, following in FOLLOWS.items() if following)


@dataclass(frozen=True, slots=True)
class Approval:
    """One approval as recorded. Times are epoch milliseconds of the store; 0 stands for none.

    `decisions` are the answers so far, oldest first: `{by, approved, note, from, at, arguments?, link?}`. `asked` counts how
    often humans were asked about it, `version` the changes; `escalated_from` and `escalated_to` name the approvals before and after.
    """

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
    gate: Gate
    submitted_by: str
    state: ApprovalState = ApprovalState.PENDING
    requested_at: int = 0
    expires_at: int = 0
    decided_at: int = 0
    decided_by: str = ""
    note: str = ""
    decisions: tuple[dict[str, Any], ...] = ()
    approved_arguments: dict[str, Any] | None = None
    escalated_from: str = ""
    escalated_to: str = ""
    called_back: bool = False
    asked: int = 1
    version: str = "0"

    @property
    def step(self) -> StepId:
        """The step of its call."""
        return StepId(self.tenant, self.turn_id, self.round, StepKind.TOOL, self.index)

    @property
    def told(self) -> str:
        """It, as an error names it."""
        return f"approval {self.approval_id} for {self.prefix}"


@dataclass(frozen=True, slots=True)
class Decision:
    """An answer to an approval: yes or no, perhaps with other arguments, perhaps with a note that the model reads after a no.

    `source` says from where it came, `link` names the decision link that it came through.
    """

    by: Principal
    approved: bool
    arguments: dict[str, Any] | None = None
    note: str = ""
    source: str = ""
    link: str = ""


def asked(request: TurnRequest, agent: str, record: CallRecord, round_: int, index: int, now_ms: int) -> Approval:
    """The approval that a gated call begins with."""
    assert record.gate is not None and record.arguments is not None
    return Approval(
        approval_id=record.approval_id,
        tenant=request.tenant,
        turn_id=request.turn_id,
        conversation_id=request.conversation_id,
        call_id=record.call_id,
        round=round_,
        index=index,
        agent=agent,
        tool=record.name,
        prefix=record.prefix,
        arguments=record.arguments,
        schema=record.schema,
        gate=record.gate,
        submitted_by=request.principal.sub,
        requested_at=now_ms,
        expires_at=_expiry(record.gate.timeout_s, now_ms),
        called_back=bool(request.callback_url),
    )


def asked_again(approval: Approval, now_ms: int) -> Approval:
    """The approval that follows one whose time was up under a gate that escalates: the same call, other roles, a new deadline."""
    gate = approval.gate.escalated()
    return replace(
        approval,
        approval_id=f"{approval.approval_id}_e",
        gate=gate,
        state=ApprovalState.PENDING,
        requested_at=now_ms,
        expires_at=_expiry(gate.timeout_s, now_ms),
        decisions=(),
        approved_arguments=None,
        escalated_from=approval.approval_id,
        asked=1,
        version="0",
    )


def reopened(approval: Approval, timeout_s: float | None, now_ms: int) -> Approval:
    """A held approval as it is once humans are asked again; `timeout_s` None means for as long as its gate says."""
    expires_at = _expiry(timeout_s if timeout_s is not None else approval.gate.timeout_s, now_ms)
    return replace(approval, state=ApprovalState.PENDING, expires_at=expires_at, asked=approval.asked + 1)


def _expiry(timeout_s: float | None, now_ms: int) -> int:
    return now_ms + max(1, round(timeout_s * 1000)) if timeout_s is not None else 0


def reminder_at(approval: Approval) -> int:
    """When a reminder is due, in ms of the store; 0 for never."""
    before_s = approval.gate.remind_before_s
    return approval.expires_at - round(before_s * 1000) if before_s is not None and approval.expires_at else 0


def may_decide(approval: Approval, by: Principal) -> None:
    """Whether `by` may decide at all.

    Raises:
        Forbidden: it lacks the scope, or every role that the gate names, or submitted the turn where the gate wants four eyes.
    """
    by.require(Scope.APPROVALS_DECIDE)
    roles = tuple(approval.gate.roles)
    if not by.has_role(roles):
        raise Forbidden(f"approval {approval.approval_id} needs one of the roles {', '.join(roles)}")
    if approval.gate.four_eyes and by.sub == approval.submitted_by:
        raise Forbidden(f"approval {approval.approval_id} needs another principal than the one who submitted the turn")


def settle(approval: Approval, decision: Decision) -> Approval:
    """`approval` as `decision` leaves it; the same decision by the same principal changes nothing and returns it as it is.

    One denial settles it. An approval settles it once as many different principals as the gate's quorum agreed to the same
    arguments; until then it stays pending.

    Raises:
        Forbidden: see `may_decide`.
        AlreadyDecided: somebody decided otherwise before, or this link has decided; carries the approval.
        ApprovalExpired, ApprovalCancelled: there is nothing to decide any more; one that is held has to be reopened first.
        ArgumentsInvalid: the edited arguments break the tool's schema; nothing is decided.
        ArgumentsDiffer: others of the quorum approved other arguments; this decision is not counted.
    """
    may_decide(approval, decision.by)
    refuse_ended(approval)
    runs = decision.arguments if decision.approved and decision.arguments is not None else approval.arguments
    mine = [one for one in approval.decisions if one["by"] == decision.by.sub]
    if any(_is_repeated(approval, one, decision, runs) for one in mine):
        return approval
    if approval.state is not ApprovalState.PENDING:
        raise AlreadyDecided(f"approval {approval.approval_id} was {approval.state} by {approval.decided_by}", as_api(approval))
    if decision.link and any(one.get("link") == decision.link for one in mine):
        raise AlreadyDecided(f"approval {approval.approval_id}: this link has been used", as_api(approval))
    if decision.approved:
        _check_arguments(approval, decision, runs)
    entry: dict[str, Any] = {"by": decision.by.sub, "approved": decision.approved, "note": decision.note, "from": decision.source}
    if decision.approved and decision.arguments is not None:
        entry["arguments"] = decision.arguments
    if decision.link:
        entry["link"] = decision.link
    agreed = {one["by"] for one in approval.decisions if one["approved"]} | {decision.by.sub}
    state = ApprovalState.DENIED
    if decision.approved:
        state = ApprovalState.APPROVED if len(agreed) >= approval.gate.quorum else ApprovalState.PENDING
    return replace(
        approval,
        state=state,
        decided_by=decision.by.sub if state is not ApprovalState.PENDING else "",
        note=decision.note if state is not ApprovalState.PENDING else "",
        decisions=(*approval.decisions, entry),
        approved_arguments=runs if decision.approved else None,
    )


def refuse_ended(approval: Approval) -> None:
    """Raises ApprovalExpired or ApprovalCancelled where there is nothing to decide any more."""
    if approval.state is ApprovalState.EXPIRED:
        if approval.escalated_to:
            raise ApprovalExpired(f"{approval.told} expired; others are asked as {approval.escalated_to}")
        raise ApprovalExpired(f"{approval.told} expired; the call did not run and will not")
    if approval.state is ApprovalState.HELD:
        raise ApprovalExpired(f"{approval.told} was not decided in time and is held; reopen it to decide")
    if approval.state is ApprovalState.CANCELLED:
        raise ApprovalCancelled(f"{approval.told} was cancelled; the call did not run and will not")


def _is_repeated(approval: Approval, before: dict[str, Any], decision: Decision, runs: dict[str, Any]) -> bool:
    """Whether `before`, of the same principal, said what `decision` says now."""
    if before["approved"] is not decision.approved:
        return False
    if not decision.approved:
        return approval.state is ApprovalState.DENIED
    return approval.state in (ApprovalState.PENDING, ApprovalState.APPROVED) and same_json(runs, approval.approved_arguments)


def _check_arguments(approval: Approval, decision: Decision, runs: dict[str, Any]) -> None:
    if decision.arguments is not None:
        faults = schema_faults(approval.schema, decision.arguments)
        if faults:
            raise ArgumentsInvalid(f"the edited arguments break the schema of {approval.prefix}; nothing is decided", faults)
    if any(one["approved"] for one in approval.decisions) and not same_json(runs, approval.approved_arguments):
        raise ArgumentsDiffer(f"approval {approval.approval_id}: others approved other arguments; this decision is not counted")


def same_json(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same; `1` and `1.0` are, `1` and `true` are not."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same_json(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def request_frame(approval: Approval, **more: Any) -> str:
    """The frame that tells watchers that a human is asked; `more` says why again, after the first time."""
    fields: dict[str, Any] = {
        "approval_id": approval.approval_id,
        "tool_call_id": approval.call_id,
        "name": approval.tool,
        "arguments": approval.arguments,
        "reason": approval.gate.reason,
        "roles": list(approval.gate.roles),
        "expires_at": rfc3339(approval.expires_at),
    }
    if approval.escalated_from:
        fields["escalated_from"] = approval.escalated_from
    return frame(FrameKind.APPROVAL_REQUEST, approval.turn_id, approval.round, **fields, **more)


def as_api(approval: Approval) -> dict[str, Any]:
    """The approval in the API's shape."""
    settled = approval.state is ApprovalState.APPROVED and approval.approved_arguments is not None
    return {
        "approval_id": approval.approval_id,
        "state": str(approval.state),
        "turn_id": approval.turn_id,
        "conversation_id": approval.conversation_id,
        "call_id": approval.call_id,
        "agent": approval.agent,
        "tool": approval.tool,
        "prefix": approval.prefix,
        "arguments": approval.approved_arguments if settled else approval.arguments,
        "schema": approval.schema,
        "reason": approval.gate.reason,
        "roles": list(approval.gate.roles),
        "submitted_by": approval.submitted_by,
        "requested_at": rfc3339(approval.requested_at),
        "expires_at": rfc3339(approval.expires_at),
        "on_expiry": str(approval.gate.on_expiry),
        "quorum": approval.gate.quorum,
        "four_eyes": approval.gate.four_eyes,
        "decisions": [_decision_as_api(entry) for entry in approval.decisions],
        "escalated_from": approval.escalated_from or None,
        "escalated_to": approval.escalated_to or None,
        "decided_by": approval.decided_by or None,
        "decided_at": rfc3339(approval.decided_at),
        "note": approval.note or None,
    }


def _decision_as_api(entry: dict[str, Any]) -> dict[str, Any]:
    shown = {"by": entry["by"], "approved": entry["approved"], "at": rfc3339(entry.get("at")), "note": entry["note"] or None}
    return shown | {"arguments": entry["arguments"]} if "arguments" in entry else shown
