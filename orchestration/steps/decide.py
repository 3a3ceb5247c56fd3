"""decide: carry out a recorded decision, which sends the suspended tool step again, with the id and the chord that it had."""

from __future__ import annotations

from orchestration.actions.pass_on import pass_on
from orchestration.core.ids import StepId
from orchestration.steps.faults import reached
from orchestration.wiring import Ports


def decide(step: StepId, ports: Ports) -> None:
    """Send the header whose approval was settled, if there is one to send. Safe to run any number of times."""
    reached("before_claim", step)
    header = ports.approvals.resume(step)
    reached("resumed", step)
    if header is not None:
        pass_on(ports, [header.step], headers=header.headers, traceparent=header.traceparent)
    reached("committed", step)
