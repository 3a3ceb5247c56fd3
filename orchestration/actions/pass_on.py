"""Sending what a commit put into the outbox. Failing to send loses nothing: a sweep sends it later."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from orchestration.core.errors import StoreUnavailable
from orchestration.core.ids import StepId
from orchestration.wiring import Ports

log = logging.getLogger("turnmill.outbox")


def pass_on(ports: Ports, steps: Sequence[StepId], *, headers: Sequence[int] | None = None, traceparent: str = "") -> None:
    """Send the tasks of `steps` and remember that they were sent.

    A caller that knows the round gives the `headers` of its chord (empty for none), which saves a look into the journal.
    """
    if not steps:
        return
    try:
        ports.queue.send(steps, headers=headers, traceparent=traceparent)
    except StoreUnavailable as error:
        log.warning("%s; %d step(s) stay in the outbox", error, len(steps))
        return
    ports.outbox.sent(steps)
