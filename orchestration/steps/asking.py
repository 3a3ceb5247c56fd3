"""What a plan needs to have humans asked: the agent's policy as a rule, the approvals of a round, the frames that tell of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from orchestration.core.agent import Agent
from orchestration.core.approval import asked, request_frame
from orchestration.core.call import CallRecord
from orchestration.core.ids import StepId
from orchestration.core.policy import PolicyCall, PolicyFailed, Rule, Verdict
from orchestration.core.round import PlannedCall
from orchestration.core.turn import TurnRequest
from orchestration.state.approvals import new_approval
from orchestration.steps.policy import verdict_in_time
from orchestration.wiring import Ports

log = logging.getLogger("turnmill.steps")


def rule_of(agent: Agent, request: TurnRequest) -> Rule:
    """The agent's policy, bound to the turn whose calls it judges."""

    def said(name: str, prefix: str, arguments: dict[str, Any]) -> Verdict | PolicyFailed:
        copied = deepcopy(arguments)  # what a policy does to its copy does not change the call
        call = PolicyCall(name, prefix, copied, agent.name, request.turn_id, request.conversation_id, request.principal)
        return verdict_in_time(agent.policy, call)

    return said


def approval_of(
    ports: Ports, request: TurnRequest, agent: str, record: CallRecord, step: StepId, index: int, now_ms: int
) -> dict[str, Any]:
    """The approval of a gated call, as a commit takes it; `now_ms` is the store's time."""
    return new_approval(asked(request, agent, record, step.round, index, now_ms), hooked=ports.project.on_approval_request is not None)


def approval_frame(request: TurnRequest, agent: str, record: CallRecord, step: StepId, index: int, now_ms: int) -> str:
    """The frame that goes out together with that approval."""
    return request_frame(asked(request, agent, record, step.round, index, now_ms))


def log_refused(step: StepId, calls: Sequence[PlannedCall]) -> None:
    """Tell operators of calls that an agent's declaration keeps from running although their tools are there."""
    for planned in calls:
        if planned.result is not None and planned.result.code in ("approval_unavailable", "policy_failed"):
            log.warning("step %s: a call of %s was refused: %s", step.task_id, planned.record.prefix, planned.result.code)
