"""Start the turn of an agent that another one asks as a tool. The tool step then holds nothing; the end of that turn settles the call."""

from __future__ import annotations

from dataclasses import replace

from orchestration.actions.pass_on import pass_on
from orchestration.core.accounts import accounts_below
from orchestration.core.agent_tool import child_request
from orchestration.core.conversation import input_entry
from orchestration.core.frames import FrameKind, frame
from orchestration.core.ids import StepId, StepKind
from orchestration.core.safe_json import dumps
from orchestration.state.journal import Claim, ToolWork
from orchestration.steps.faults import reached
from orchestration.wiring import Ports


def start_agent(claim: Claim, work: ToolWork, ports: Ports) -> bool:
    """Start the turn that answers a call, once; returns whether the call's message must not count as ended, being part of a chord.

    Raises:
        UnknownAgent: an agent is no longer declared; nothing was started.
    """
    step, record, request = claim.step, work.record, work.request
    asked = ports.project.agent(record.agent)
    accounts = accounts_below(request, ports.project.agent(record.asked_by).limits)
    chord = ports.conversations.fields(step.tenant, step.turn_id, f"h:{step.round}")[0]
    arguments = work.approved_arguments if work.approved_arguments is not None else record.arguments or {}
    child = child_request(request, record, arguments, step.round, step.index, accounts)
    child = replace(child, snapshot=ports.project.snapshot(asked.name))
    about = {"tool_call_id": record.call_id, "name": record.name}
    # beginnings of frames of the caller's: one around each frame of the child's, one for a result that no step makes
    up = frame(FrameKind.CHILD, step.turn_id, step.round, **about, agent=asked.name)[:-1] + ',"frame":'
    told = frame(FrameKind.TOOL_RESULT, step.turn_id, step.round, **about)[:-1]
    started = {
        "turn": child.turn_id,
        "conv": child.conversation_id,
        "agent": asked.name,
        "request": dumps(child.as_json()),
        "entry": dumps(input_entry(child.turn_id, child.input)),
        "trace": child.traceparent,
        "up": up,
        "told": told,
        "deadline_s": "" if asked.limits.deadline_s is None else str(asked.limits.deadline_s),
    }
    ring = ports.queue.ring([StepId(step.tenant, child.turn_id, 1, StepKind.PLAN)])
    committed = ports.journal.commit(step.tenant, step.turn_id, {"child": started, "ring": ring}, claim)
    reached("committed", step)
    if committed.ours:
        pass_on(ports, committed.sends, traceparent=child.traceparent)
    return chord is not None and committed.ours
