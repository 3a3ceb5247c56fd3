"""What the end of a round and the end of a turn leave behind: entries of the log, final fields, frames, and what the agent that
asked for a turn reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestration.core.agent_tool import parent_of, told_to_parent
from orchestration.core.call import CallRecord, CallResult
from orchestration.core.conversation import Entry, asked_entry, cut, result_entry
from orchestration.core.frames import FrameKind, frame
from orchestration.core.ids import StepId
from orchestration.core.limits import usage_shown
from orchestration.core.model import ModelReply, Usage
from orchestration.core.round import EndTurn
from orchestration.core.safe_json import clean_text, dumps
from orchestration.core.turn import TurnRequest, TurnState, state_at_end

#: Characters of arguments or results that a frame carries.
MAX_FRAME_CHARS = 65_536


def ending(
    step: StepId, request: TurnRequest, decided: EndTurn, usage: Usage, frames: Sequence[str] = (), *, cost_micros: int = 0
) -> dict[str, Any]:
    """The part of a commit that ends a turn: `fin`, and `frames` with those of the end behind them."""
    fin = {"state": str(state_at_end(decided.reason)), "stop": str(decided.reason), "answer": decided.text}
    told = list(frames)
    if decided.output is not None:
        fin["output"] = dumps(decided.output)
    if decided.error is not None:
        fin["error"] = dumps(decided.error)
        told.append(frame(FrameKind.ERROR, step.turn_id, step.round, **decided.error))
    else:
        typed = {"output": decided.output} if decided.output is not None else {}
        said = {"content": decided.text, **typed, "stop_reason": str(decided.reason)}
        told.append(frame(FrameKind.MESSAGE, step.turn_id, step.round, **said))
    told.append(frame(FrameKind.DONE, step.turn_id, step.round, stop_reason=str(decided.reason), usage=usage_shown(usage, cost_micros)))
    if request.parent and fin["state"] == TurnState.COMPLETED:
        fin |= _told_to_parent(request, decided.text, fin.get("output", ""))
    return {"frames": told, "fin": fin}


def round_log(step: StepId, reply: ModelReply, calls: Sequence[tuple[CallRecord, CallResult]]) -> list[Entry]:
    """One round as log entries: the model's reply, then what came of its calls, in their order."""
    results = [result_entry(step.turn_id, step.round, record.call_id, record.name, result) for record, result in calls]
    return [asked_log(step, reply, [record for record, _ in calls]), *results]


def asked_log(step: StepId, reply: ModelReply, records: Sequence[CallRecord]) -> Entry:
    """The first entry of a round: the model's reply with its calls."""
    asked = [(record.call_id, record.name, _arguments(record)) for record in records]
    return asked_entry(step.turn_id, step.round, clean_text(reply.content), asked, clean_text(reply.thinking), reply.thinking_blocks)


def _arguments(record: CallRecord) -> str:
    return dumps(record.arguments) if record.arguments is not None else record.raw_arguments


def _told_to_parent(request: TurnRequest, answer: str, output: str) -> dict[str, str]:
    parent = parent_of(request)
    assert parent is not None
    result = told_to_parent(answer, output)
    told = frame(
        FrameKind.TOOL_RESULT,
        parent.turn_id,
        parent.round,
        tool_call_id=parent.call_id,
        name=parent.name,
        content=cut(result.content, MAX_FRAME_CHARS),
        error=False,
    )
    return {"told": dumps(result.as_json()), "told_frame": told}
