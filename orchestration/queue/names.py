"""Names that operators see: tasks, queues, and how a step becomes a task's arguments. Ids only: nothing here may carry content."""

from __future__ import annotations

from orchestration.core.ids import StepId, StepKind
from orchestration.core.outbound import Way

PLAN, TOOL, OBSERVE, DECIDE = "turn.plan", "turn.tool", "turn.observe", "approval.decide"

#: The task of each kind of step.
TASKS = {StepKind.PLAN: PLAN, StepKind.TOOL: TOOL, StepKind.OBSERVE: OBSERVE, StepKind.DECIDE: DECIDE}

#: The queue of each kind of step. Hosts of ours route by task name and may send elsewhere.
QUEUES = {StepKind.PLAN: "plan", StepKind.OBSERVE: "plan", StepKind.TOOL: "tools", StepKind.DECIDE: "control"}

#: The task of each way in which somebody outside is told.
OUTBOUND = {Way.CALLBACK: "outbound.callback", Way.HOOK: "outbound.hook", Way.ANSWER: "outbound.answer", Way.ROUND: "outbound.round"}

#: Where recovery runs: a worker that consumes this queue also sweeps.
CONTROL_QUEUE = "control"

#: What a suspended header tells Flower.
WAITING_EVENT = "task-waiting_approval"


def arguments(step: StepId) -> list[str | int]:
    """A task's arguments; `step_of` takes them back."""
    plain: list[str | int] = [step.tenant, step.turn_id, step.round]
    return [*plain, step.index] if step.kind in (StepKind.TOOL, StepKind.DECIDE) else plain


def step_of(kind: StepKind, tenant: str, turn_id: str, round_: int, index: int = 0) -> StepId:
    """The step that a task's arguments name."""
    return StepId(tenant, turn_id, round_, kind, index)


def group_of(step: StepId) -> str:
    """The id of the chord of a step's round; made from it, so that a round sent twice is one chord."""
    return f"{step.turn_id}.{step.round}"
