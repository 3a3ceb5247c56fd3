"""Cancel: end a turn, or one of its calls, for somebody who wishes it. What runs is disowned; what has not begun never runs."""

from __future__ import annotations

import json
from typing import Any

from orchestration.actions.pass_on import pass_on
from orchestration.actions.read import turn as read_turn
from orchestration.actions.refuse import cancel_approval
from orchestration.core.call import OPEN_CALLS, CallState
from orchestration.core.conversation import round_entries
from orchestration.core.errors import CallEnded, NotFound, TurnEnded
from orchestration.core.frames import FrameKind, frame
from orchestration.core.loop import denial, unanswered, unknown_outcome
from orchestration.core.principal import Principal, Scope
from orchestration.core.safe_json import dumps
from orchestration.core.turn import ENDED, StopReason, state_at_end
from orchestration.state.conversations import TurnView
from orchestration.state.journal import reply_from_json
from orchestration.wiring import Ports


def cancel_turn(ports: Ports, principal: Principal, turn_id: str, source: str = "") -> dict[str, Any]:
    """End the turn now: its approvals are cancelled, its running steps disowned; returns the ended turn.

    Raises:
        NotFound: there is no such turn of the principal's tenant.
        TurnEnded: it had ended before.
    """
    principal.require(Scope.TURNS_WRITE)
    if not end_now(ports, principal.tenant, turn_id, StopReason.CANCELLED, by=principal.sub, source=source):
        raise TurnEnded(f"turn {turn_id} has ended")
    return read_turn(ports, principal.tenant, turn_id)


def cancel_for_interrupt(ports: Ports, tenant: str, turn_id: str, *, by: str) -> None:
    """End the turn that a newer one, of the principal `by`, interrupts, if it has not ended by itself."""
    end_now(ports, tenant, turn_id, StopReason.CANCELLED, by=by, source="interrupt")


def cancel_as_due(ports: Ports, tenant: str, turn_id: str) -> None:
    """End a turn whose cancel is due: nobody waits any more for its answer, or whoever interrupted it died over that.

    In the audit stream it was ended by whoever ended what it ran for.
    """
    by, source = (json.loads(text or "null") for text in ports.conversations.fields(tenant, turn_id, "cancel_by", "cancel_from"))
    end_now(ports, tenant, turn_id, StopReason.CANCELLED, by=by or "", source=source or "interrupt")


def end_now(
    ports: Ports,
    tenant: str,
    turn_id: str,
    reason: StopReason,
    *,
    code: str = "",
    detail: str = "",
    by: str = "",
    source: str = "",
    due: str = "",
    expired: str = "",
) -> bool:
    """End a turn from outside its steps, whatever it is doing; False when it had ended. The conversation's log stays well paired.

    Args:
        by: the principal who ended it, and `source` from where, for the audit stream.
        due: the due entry that says so; when it is not due any more, nothing happens, and the answer is False.
        expired: the approval whose time was up, if that ends it.

    Raises:
        NotFound: there is no such turn.
    """
    while True:
        view = ports.conversations.turn(tenant, turn_id)
        if view.state in ENDED:
            return False
        change = _ending(view, reason, code, detail, expired)
        if due:
            change["due"] = due
        if expired:
            change["expired"] = expired
        change["fin"] |= {"by": dumps(by or None), "from": dumps(source or None)}
        committed = ports.journal.commit(tenant, turn_id, change)
        if committed.ours:
            pass_on(ports, committed.sends)
            return True
        if committed.why in ("ended", "not_due"):
            return False


def _ending(view: TurnView, reason: StopReason, code: str, detail: str, expired: str) -> dict[str, Any]:
    turn_id = view.request.turn_id
    round_ = view.open_round()
    calls = [call for call in view.calls if call.round == round_]
    open_calls = [call for call in calls if call.state in OPEN_CALLS]
    closed = unanswered([call.state for call in open_calls], [call.record.name for call in open_calls])
    results = {call.index: result for call, result in zip(open_calls, closed, strict=True)}
    for call in open_calls:
        if expired and call.record.approval_id == expired:
            results[call.index] = denial(CallState.EXPIRED, call.record.name)
    frames, entries = [], []
    for call in open_calls:
        result = results[call.index]
        if call.state is CallState.WAITING:
            frames.append(
                frame(
                    FrameKind.APPROVAL_DECISION,
                    turn_id,
                    call.round,
                    approval_id=call.record.approval_id,
                    tool_call_id=call.record.call_id,
                    error=True,
                    note=str(result.state),
                )
            )
        frames.append(
            frame(
                FrameKind.TOOL_RESULT,
                turn_id,
                call.round,
                tool_call_id=call.record.call_id,
                name=call.record.name,
                content=result.content,
                error=True,
            )
        )
    if round_ is not None and calls:
        reply = reply_from_json(view.raw[f"p:{round_}"])
        entries = round_entries(
            turn_id,
            round_,
            reply.content,
            [(call.record.call_id, call.record.name, _arguments_text(call)) for call in calls],
            [call.result or results[call.index] for call in calls],
            reply.thinking,
            reply.thinking_blocks,
        )
    error = {"code": code, "detail": detail} if code else None
    if error:
        frames.append(frame(FrameKind.ERROR, turn_id, code=code, detail=detail))
    usage = {"input_tokens": view.number("in"), "output_tokens": view.number("out")}
    frames.append(frame(FrameKind.DONE, turn_id, stop_reason=str(reason), usage=usage))
    fin = {"state": str(state_at_end(reason)), "stop": str(reason)} | ({"error": dumps(error)} if error else {})
    return {
        "version": view.version,
        "close": [
            {
                "round": call.round,
                "index": call.index,
                "state": str(results[call.index].state),
                "result": dumps(results[call.index].as_json()),
            }
            for call in open_calls
        ],
        "log": [dumps(entry) for entry in entries],
        "frames": frames,
        "fin": fin,
    }


def _arguments_text(call: Any) -> str:
    return dumps(call.arguments) if call.arguments is not None else call.record.raw_arguments


def cancel_call(ports: Ports, principal: Principal, turn_id: str, call_id: str, source: str = "") -> dict[str, Any]:
    """Cancel one tool call; the model reads that it was cancelled, and the turn goes on. Returns the turn.

    Raises:
        NotFound: there is no such turn, or no such call in it.
        CallEnded: the call, or its whole turn, had ended before.
    """
    principal.require(Scope.TURNS_WRITE)
    while True:
        view = ports.conversations.turn(principal.tenant, turn_id)
        call = next((call for call in view.calls if call.record.call_id == call_id), None)
        if call is None:
            raise NotFound("there is no such call in this turn")
        if call.state not in OPEN_CALLS or view.state in ENDED:
            raise CallEnded(f"call {call_id} has ended")
        name = call.record.name
        if call.state is CallState.WAITING:
            if cancel_approval(ports, principal.tenant, call.record.approval_id, by=principal.sub, source=source):
                return read_turn(ports, principal.tenant, turn_id)
            continue
        result = unknown_outcome(name) if call.state is CallState.RUNNING else denial(CallState.CANCELLED, name)
        sends = ports.journal.cancel_call(
            principal.tenant,
            turn_id,
            view.version,
            call.round,
            call.index,
            dumps(result.as_json()),
            str(result.state),
            [frame(FrameKind.TOOL_RESULT, turn_id, call.round, tool_call_id=call_id, name=name, content=result.content, error=True)],
            by=principal.sub,
            source=source,
        )
        if sends is not None:
            pass_on(ports, sends)
            return read_turn(ports, principal.tenant, turn_id)
