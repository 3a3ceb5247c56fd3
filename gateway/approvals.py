"""Routes of approvals: what waits for a human, and the human's decision."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from gateway.auth import DecidesApprovals, ReadsApprovals
from gateway.bodies import json_answer
from gateway.parts import GatewayParts, known_id
from orchestration.actions import read
from orchestration.actions.decide import decide
from orchestration.core.ids import ID_PATTERN

router = APIRouter(prefix="/v1/approvals", tags=["approvals"])


class DecisionBody(BaseModel):
    """What `POST /v1/approvals/{id}/decision` takes. Only a JSON `true` approves."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    approved: bool
    arguments: dict[str, Any] | None = None
    note: str | None = Field(None, max_length=10_000)


@router.get("", summary="List approvals")
def list_approvals(
    principal: ReadsApprovals,
    parts: GatewayParts,
    state: Literal["pending", "held", "approved", "denied", "expired", "cancelled"] = "pending",
    agent: Annotated[str | None, Query(pattern=ID_PATTERN)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=256, pattern=r"^[A-Za-z0-9_.:-]*$")] = None,
) -> Response:
    """Approvals of the tenant, oldest first; a `cursor` in the answer leads to the rest."""
    return json_answer(read.approvals(parts.ports, principal.tenant, state, agent, limit, cursor))


@router.get("/{approval_id}", summary="Read an approval")
def get_approval(approval_id: str, principal: ReadsApprovals, parts: GatewayParts) -> Response:
    """One approval with the arguments that would run."""
    return json_answer(read.approval(parts.ports, principal.tenant, known_id(approval_id, "approval")))


@router.post("/{approval_id}/decision", summary="Decide an approval")
def decide_approval(approval_id: str, body: DecisionBody, principal: DecidesApprovals, parts: GatewayParts) -> Response:
    """Approve or deny one tool call; 200 says that the decision is recorded and will be carried out."""
    known_id(approval_id, "approval")
    return json_answer(decide(parts.ports, principal, approval_id, body.approved, body.arguments, body.note, "rest"))
