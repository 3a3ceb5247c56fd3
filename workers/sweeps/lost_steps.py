"""Steps that were sent but never claimed. One is lost when steps sent long after it have been claimed, or when its
queue is empty; a backlog alone is no loss."""

from __future__ import annotations

import logging

from orchestration.actions.pass_on import pass_on
from orchestration.core.ids import StepKind
from orchestration.queue.names import QUEUES
from orchestration.state.outbox import Leftovers
from orchestration.wiring import Ports

log = logging.getLogger("turnmill.sweeps")

#: One kind of step for each queue, to ask for its length by.
_KINDS = {"plan": StepKind.PLAN, "tools": StepKind.TOOL, "control": StepKind.DECIDE}


def send_lost(ports: Ports, found: Leftovers) -> None:
    """Send again what is lost, each step once until it is found lost anew."""
    lost = list(found.lost)
    by_queue: dict[str, list[int]] = {}
    for place, step in enumerate(found.doubtful):
        by_queue.setdefault(QUEUES[step.kind], []).append(place)
    for queue, places in by_queue.items():
        if ports.queue.is_empty(_KINDS[queue]):
            lost.extend(found.doubtful[place] for place in places)
    if not lost:
        return
    again = ports.outbox.resend(lost)
    if again:
        log.warning("sending %d step(s) again that were sent but lost", len(again))
        pass_on(ports, again)
