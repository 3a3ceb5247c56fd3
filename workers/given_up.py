"""Steps that this process holds although none of its threads works on them: an exception got out of a step's code, or a claim was
taken for unanswered and stands all the same. The lease that the process renews would keep them running for ever."""

from __future__ import annotations

import logging

from orchestration.actions.cancel import end_now
from orchestration.actions.take_back import take_back
from orchestration.core.errors import NotFound, StepLost, StoreUnavailable
from orchestration.core.limits import Limits
from orchestration.core.turn import StopReason
from orchestration.state.leases import GivenUp
from orchestration.steps.faults import pause_before
from orchestration.wiring import Ports

log = logging.getLogger("turnmill.lease")


def hand_back(ports: Ports) -> None:
    """Pass on what this process has given up, after a pause that grows; a step that is given up again and again ends its turn.

    Raises:
        StoreUnavailable: what is left is found at the next call.
    """
    for found in ports.lease.given_up():
        try:
            _hand_back(ports, found)
        except StoreUnavailable:
            raise
        except Exception as error:
            log.error("step %s was given up and could not be handed back (%s); its turn ends", found.step.task_id, type(error).__name__)
            _end(ports, found)


def _hand_back(ports: Ports, found: GivenUp) -> None:
    if found.unbegun:
        take_back(ports, found.step, found.owner, unbegun=True)
    elif found.attempt < Limits().max_attempts:
        log.warning("step %s was given up in mid-work; it is handed back", found.step.task_id)
        take_back(ports, found.step, found.owner, pause_ms=round(pause_before(found.attempt, None) * 1000))
    else:
        log.error("step %s was given up %d times; its turn ends", found.step.task_id, found.attempt)
        _end(ports, found)


def _end(ports: Ports, found: GivenUp) -> None:
    step = found.step
    try:
        end_now(ports, step.tenant, step.turn_id, StopReason.ERROR, code=StepLost.code, detail="a step failed in an unexpected way")
    except NotFound:
        log.info("the turn of step %s is not kept any more", step.task_id)
    except StoreUnavailable:
        raise
    except Exception as error:
        log.error("the turn of step %s could not be ended (%s)", step.task_id, type(error).__name__)
