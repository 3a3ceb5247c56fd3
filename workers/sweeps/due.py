"""What is due: pauses that are over, approvals and turns whose time is up, cancels that somebody died over. Each is
safe to handle twice."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from orchestration.actions.cancel import end_now
from orchestration.actions.decide import refuse
from orchestration.actions.pass_on import pass_on
from orchestration.core.approval import ApprovalState
from orchestration.core.errors import NotFound
from orchestration.core.ids import StepId
from orchestration.core.turn import StopReason
from orchestration.wiring import Ports

log = logging.getLogger("turnmill.sweeps")


def handle_due(ports: Ports, entries: Sequence[str]) -> None:
    """Do what each entry says; one that fails stays due and is tried again."""
    for entry in entries:
        kind, _, name = entry.partition(":")
        try:
            _handle(ports, kind, name)
        except NotFound:
            log.info("nothing left to do for a due %s", kind)
        ports.outbox.no_longer_due(entry)


def _handle(ports: Ports, kind: str, name: str) -> None:
    if kind == "step":
        pass_on(ports, ports.outbox.promote(StepId.parse(name)))
        return
    tenant, _, id_ = name.partition("/")
    if kind == "expire":
        refuse(ports, tenant, id_, ApprovalState.EXPIRED)
    elif kind == "deadline":
        end_now(ports, tenant, id_, StopReason.DEADLINE, code="deadline", detail="the turn's time was up")
    elif kind == "cancel":
        end_now(ports, tenant, id_, StopReason.CANCELLED)
    else:
        log.warning("a due entry of unknown kind %r is left to a newer release", kind)
