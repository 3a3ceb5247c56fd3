"""What is due: pauses that are over, approvals and turns whose time is up, reminders, deliveries to the outside, cancels that somebody
died over. Each is safe to handle twice, and one that fails holds up no other."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from orchestration.actions.cancel import cancel_as_due, end_now
from orchestration.actions.expire import expire, remind
from orchestration.actions.pass_on import pass_on
from orchestration.core.errors import NotFound, StoreUnavailable
from orchestration.core.ids import StepId, StepKind
from orchestration.core.outbound import Delivery
from orchestration.core.turn import StopReason
from orchestration.wiring import Ports

log = logging.getLogger("turnmill.sweeps")

#: Until an entry that failed, or that only a newer release understands, is looked at again, in milliseconds.
AGAIN_MS, UNKNOWN_MS = 5_000, 60_000

#: After how long a delivery's message counts as lost although its queue is not empty, in milliseconds.
LOST_MS = 60_000

#: Entries that are handled at a time: each waits for Redis most of the time, and many approvals may expire at once.
AT_ONCE = 8


def handle_due(ports: Ports, entries: Sequence[str]) -> None:
    """Do what each entry says and take it out, unless it was moved meanwhile; one that fails is tried again after a pause.

    Raises:
        StoreUnavailable: state or broker is away; what was not done stays due.
    """
    due = ports.due.still(entries)
    if not due:
        return
    handled: dict[str, str] = {}
    with ThreadPoolExecutor(min(AT_ONCE, len(due)), thread_name_prefix="due") as pool:
        doing = {entry: pool.submit(_one, ports, entry, seen_at) for entry, seen_at in due.items()}
    for entry, done in doing.items():
        if done.exception() is None and done.result():
            handled[entry] = due[entry]
    ports.due.done(handled)
    for done in doing.values():
        done.result()  # raises what kept one from being done


def _one(ports: Ports, entry: str, seen_at: str) -> bool:
    """Do what one entry says; whether it is to be taken out."""
    kind, _, name = entry.partition(":")
    try:
        if _handle(ports, kind, name, entry):
            return True
        log.warning("a due entry of unknown kind %r is left to a newer release", kind)
        ports.due.later(entry, seen_at, UNKNOWN_MS)
    except NotFound:
        log.info("nothing left to do for a due %s", kind)
        return True
    except StoreUnavailable:
        raise
    except Exception as error:
        log.error("a due %s failed (%s); it is tried again", kind, type(error).__name__)
        ports.due.later(entry, seen_at, AGAIN_MS)
    return False


def _handle(ports: Ports, kind: str, name: str, entry: str) -> bool:
    """Do what an entry says; False when nobody here knows its kind."""
    tenant, _, id_ = name.partition("/")
    match kind:
        case "step":
            pass_on(ports, ports.outbox.promote(StepId.parse(name)))
        case "expire":
            expire(ports, tenant, id_)
        case "remind":
            remind(ports, tenant, id_)
        case "out":
            _send(ports, tenant, id_)
        case "deadline":
            end_now(ports, tenant, id_, StopReason.DEADLINE, code="deadline", detail="the turn's time was up", due=entry)
        case "cancel":
            cancel_as_due(ports, tenant, id_)
        case _:
            return False
    return True


def _send(ports: Ports, tenant: str, name: str) -> None:
    attempt = ports.outbound.to_send(tenant, name)
    if attempt is None:
        return
    if 0 < attempt.waited_ms < LOST_MS and not ports.queue.is_empty(StepKind.DECIDE):
        return  # its message waits its turn in a long queue; in an empty one it has been lost
    ports.queue.send_outbound(tenant, Delivery.parse(name), attempt.number)
