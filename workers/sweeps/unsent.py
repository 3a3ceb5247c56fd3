"""Steps that were committed but never passed on: their process died, or its broker was away."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from orchestration.actions.pass_on import pass_on
from orchestration.core.ids import StepId
from orchestration.wiring import Ports

log = logging.getLogger("turnmill.sweeps")


def send_unsent(ports: Ports, steps: Sequence[StepId]) -> None:
    """Send them."""
    if steps:
        log.info("sending %d step(s) that were committed but not passed on", len(steps))
        pass_on(ports, steps)
