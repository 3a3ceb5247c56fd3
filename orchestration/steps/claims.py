"""What a step claims is under way until its function has been left, in whatever way: what it leaves behind is found and passed on."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from orchestration.core.ids import StepId
from orchestration.wiring import Ports

Step = Callable[[StepId, Ports], str]


def holds_claims(step: Step) -> Step:
    """Decorates the function of one kind of step."""

    @wraps(step)
    def working(step_id: StepId, ports: Ports) -> str:
        with ports.lease.working():
            return step(step_id, ports)

    return working
