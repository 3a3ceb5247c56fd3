"""A step that was claimed and is not worked on any more: run it again, or record that nobody knows what came of it."""

from __future__ import annotations

from orchestration.actions.pass_on import pass_on
from orchestration.core.frames import FrameKind, frame
from orchestration.core.ids import StepId, StepKind
from orchestration.core.loop import unknown_outcome
from orchestration.core.safe_json import dumps
from orchestration.wiring import Ports


def take_back(ports: Ports, step: StepId, whose: str, *, pause_ms: int = 0, unbegun: bool = False) -> None:
    """Take a step from a deposed process, or from a claim ("process#number") that a living one has given up, and pass it on.

    A tool that may have been asked is asked again only when it is idempotent. A second call changes nothing.

    Args:
        unbegun: nothing was done under that claim.

    Raises:
        StoreUnavailable: it is still to be done.
    """
    result, frames = (None, "[]") if unbegun else _verdict(ports, step)
    pass_on(ports, ports.leases.reclaim(step, whose, result=result, frames=frames, pause_ms=pause_ms, unbegun=unbegun))


def _verdict(ports: Ports, step: StepId) -> tuple[str | None, str]:
    """The result to record for a step that must not run again, with its frames; None for one that may."""
    if step.kind is not StepKind.TOOL:
        return None, "[]"
    record = ports.conversations.call_record(step)
    if record is None or record.idempotent:
        return None, "[]"
    result = unknown_outcome(record.name)
    told = frame(
        FrameKind.TOOL_RESULT,
        step.turn_id,
        step.round,
        tool_call_id=record.call_id,
        name=record.name,
        content=result.content,
        error=True,
    )
    return dumps(result.as_json()), dumps([told])
