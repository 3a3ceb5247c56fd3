"""What a step does when it cannot go on: try again after a pause, or end its turn; and the instants at which tests make it stop."""

from __future__ import annotations

import logging
import os
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from orchestration.actions.pass_on import pass_on
from orchestration.core.frames import FrameKind, frame
from orchestration.core.ids import StepId
from orchestration.core.limits import usage_shown
from orchestration.core.model import Usage
from orchestration.core.safe_json import dumps
from orchestration.core.turn import StopReason, state_at_end
from orchestration.state.journal import Claim, TurnSoFar
from orchestration.wiring import Ports

log = logging.getLogger("turnmill.steps")

#: Longest pause before a step is tried again, in seconds.
MAX_PAUSE_S = 300.0

#: How often one step is begun at most, whatever ends it: a step that kills its process must not do so for ever.
MAX_CLAIMS = 20

_ARMED = os.environ.get("TURNMILL_FAULT_POINT", "")


class Unforeseen(BaseException):
    """Raised at a fault point by the action `raise`."""


def reached(point: str, step: StepId) -> None:
    """A named instant of a step. Does nothing, unless `TURNMILL_FAULT_POINT` arms it (tests only): `point:kind:action[:file]`.

    The action `kill` ends the process as kill -9 does, `stop` suspends it as SIGSTOP does, `raise` leaves the step in a way
    that none of its handlers expects; with a file each happens once, when the file can be created.
    """
    if not _ARMED:
        return
    wanted, kind, action, *once = _ARMED.split(":")
    if wanted != point or kind not in ("*", str(step.kind)):
        return
    if once:
        try:
            Path(once[0]).touch(exist_ok=False)
        except FileExistsError:
            return
    if action == "raise":
        raise Unforeseen(point)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.05)


def log_unexpected(step: StepId, error: BaseException) -> None:
    """Log a fault of ours by its kind and place; its text may hold what must not be logged."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "nowhere"
    log.error("step %s: unexpected %s at %s", step.task_id, type(error).__name__, where)


def pause_before(attempt: int, asked_for_s: float | None) -> float:
    """Seconds until a step's next attempt: what the other side asked for, else growing from half a second."""
    pause = asked_for_s if asked_for_s is not None else 0.5 * 2 ** (attempt - 1)
    return min(MAX_PAUSE_S, max(0.05, pause))


def try_again(
    ports: Ports,
    claim: Claim,
    asked_for_s: float | None,
    *,
    void_tokens: bool = False,
    uncounted: bool = False,
    maybe_ran: bool = False,
) -> None:
    """Give the step back; it becomes due again after a pause. Nothing sleeps for it. `uncounted` when nothing was tried,
    `maybe_ran` when its tool may have acted."""
    step = claim.step
    frames = [frame(FrameKind.RETRY, step.turn_id, step.round)] if void_tokens else []
    pause_ms = round(pause_before(claim.attempt, asked_for_s) * 1000)
    change = {"retry_in_ms": pause_ms, "frames": frames, "uncounted": uncounted, "maybe_ran": maybe_ran}
    ports.journal.commit(step.tenant, step.turn_id, change, claim)


def wake(ports: Ports, steps: Sequence[StepId]) -> None:
    """End the pause of steps that were given back, before its time."""
    for step in steps:
        pass_on(ports, ports.outbox.promote(step))


def end_with_error(ports: Ports, claim: Claim, turn: TurnSoFar | None, code: str, detail: str, frames: list[str]) -> None:
    """End the turn: a step failed for good. `turn` is None when it could not be read."""
    step = claim.step
    fault = {"code": code, "detail": detail[:1000]}
    counted = usage_shown(turn.usage, turn.spent.cost_micros) if turn is not None else usage_shown(Usage())
    frames = [
        *frames,
        frame(FrameKind.ERROR, step.turn_id, step.round, **fault),
        frame(FrameKind.DONE, step.turn_id, step.round, stop_reason=str(StopReason.ERROR), usage=counted),
    ]
    fin = {"state": str(state_at_end(StopReason.ERROR)), "stop": str(StopReason.ERROR), "error": dumps(fault)}
    committed = ports.journal.commit(step.tenant, step.turn_id, {"frames": frames, "fin": fin}, claim)
    if committed.ours:
        pass_on(ports, committed.sends)
