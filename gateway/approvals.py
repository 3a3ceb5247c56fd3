"""Routes of approvals: what waits for a human, the human's decision, and the audit stream. Decision links are in `links.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from gateway.auth import Administers, DecidesApprovals, ReadsApprovals
from gateway.bodies import json_answer
from gateway.parts import GatewayParts, known_id
from orchestration.actions import read
from orchestration.actions.decide import MAX_NOTE_CHARS, decide
from orchestration.actions.reopen import reopen
from orchestration.core.gate import MAX_TIMEOUT_S
from orchestration.core.ids import ID_PATTERN

router = APIRouter(tags=["approvals"])

StateName = Literal["pending", "held", "approved", "denied", "expired", "cancelled"]


class DecisionBody(BaseModel):
    """What `POST /v1/approvals/{id}/decision` takes. Only a JSON `true` approves."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    approved: bool
    arguments: dict[str, Any] | None = Field(None, description="what is to run instead of the arguments that the model asked for")
    note: str | None = Field(None, max_length=MAX_NOTE_CHARS, description="the model reads it after a no")


class ReopenBody(BaseModel):
    """What `POST /v1/approvals/{id}/reopen` takes."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    timeout_s: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False, description="seconds until it expires; the gate's own by default"
    )


class DecisionMade(BaseModel):
    """One answer to an approval."""

    model_config = ConfigDict(extra="allow")

    by: str
    approved: bool
    at: str | None
    note: str | None
    arguments: dict[str, Any] | None = None


class ApprovalShape(BaseModel):
    """The request that a human decide about one tool call. Members may be added in a later version."""

    model_config = ConfigDict(extra="allow", title="Approval")

    approval_id: str
    state: StateName
    turn_id: str
    conversation_id: str
    call_id: str
    agent: str
    tool: str
    prefix: str
    arguments: dict[str, Any]
    schema_: dict[str, Any] = Field(alias="schema")
    reason: str
    roles: list[str]
    submitted_by: str
    requested_at: str | None
    expires_at: str | None
    on_expiry: Literal["refuse", "end_turn", "escalate", "hold"]
    quorum: int
    four_eyes: bool
    decisions: list[DecisionMade]
    escalated_from: str | None
    escalated_to: str | None
    decided_by: str | None
    decided_at: str | None
    note: str | None


class ApprovalList(BaseModel):
    """Approvals, oldest first; `cursor` leads to the rest, null at the end."""

    approvals: list[ApprovalShape]
    cursor: str | None


class AuditEntry(BaseModel):
    """One entry of the audit stream: `shown` is what a human was shown, `decided` what was decided, `ran` what came of the call."""

    seq: int
    ts: str | None
    event: str
    by: str | None
    from_: str | None = Field(alias="from")
    approval_id: str
    turn_id: str
    shown: dict[str, Any] | None
    decided: dict[str, Any] | None
    ran: dict[str, Any] | None


class AuditList(BaseModel):
    """Entries, oldest first; `after` is where to go on, null at the end. A page may be empty and not the last."""

    entries: list[AuditEntry]
    after: int | None


@router.get("/v1/approvals", summary="List approvals", responses={200: {"model": ApprovalList}})
def list_approvals(
    principal: ReadsApprovals,
    parts: GatewayParts,
    state: StateName = "pending",
    agent: Annotated[str | None, Query(pattern=ID_PATTERN)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=18, pattern=r"^[0-9]*$", description="from an earlier answer")] = None,
) -> Response:
    """Approvals of the tenant, oldest first; a `cursor` in the answer leads to the rest and stays good whatever is decided meanwhile."""
    return json_answer(read.approvals(parts.ports, principal.tenant, state, agent, limit, cursor))


@router.get("/v1/approvals/{approval_id}", summary="Read an approval", responses={200: {"model": ApprovalShape}})
def get_approval(approval_id: str, principal: ReadsApprovals, parts: GatewayParts) -> Response:
    """One approval with the arguments that would run."""
    return json_answer(read.approval(parts.ports, principal.tenant, known_id(approval_id, "approval")))


@router.post("/v1/approvals/{approval_id}/decision", summary="Decide an approval", responses={200: {"model": ApprovalShape}})
def decide_approval(approval_id: str, body: DecisionBody, request: Request, principal: DecidesApprovals, parts: GatewayParts) -> Response:
    """Approve or deny one tool call; 200 says that the decision is recorded and will be carried out."""
    known_id(approval_id, "approval")
    decided = decide(
        parts.ports, principal, approval_id, body.approved, body.arguments, body.note, parts.proxies.from_where("rest", request)
    )
    return json_answer(decided)


@router.post("/v1/approvals/{approval_id}/reopen", summary="Reopen a held approval", responses={200: {"model": ApprovalShape}})
def reopen_approval(
    approval_id: str, request: Request, principal: DecidesApprovals, parts: GatewayParts, body: ReopenBody | None = None
) -> Response:
    """Have humans asked again about an approval that is held since nobody decided in time."""
    known_id(approval_id, "approval")
    timeout_s = body.timeout_s if body is not None else None
    return json_answer(reopen(parts.ports, principal, approval_id, timeout_s, parts.proxies.from_where("rest", request)))


@router.get("/v1/audit", summary="Read the audit stream", responses={200: {"model": AuditList}})
def get_audit(
    principal: Administers,
    parts: GatewayParts,
    approval_id: Annotated[str | None, Query(pattern=ID_PATTERN)] = None,
    turn_id: Annotated[str | None, Query(pattern=ID_PATTERN)] = None,
    after: Annotated[int, Query(ge=0, le=2**53, description="only entries behind this `seq`")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """What was asked of humans, decided by them, and run, in the order in which it happened; nothing of it ever changes."""
    found = read.audit(parts.ports, principal.tenant, approval_id=approval_id, turn_id=turn_id, after=after, limit=limit)
    return json_answer(found)
