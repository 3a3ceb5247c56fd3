"""A call of the loop's own that waited for a human: answered here, once it may be, as it would have been without one."""

from __future__ import annotations

from orchestration.core.call import CallResult, CallState
from orchestration.core.local_calls import LoopAnswers
from orchestration.core.safe_json import dumps
from orchestration.state.journal import ToolWork
from orchestration.steps.request import round_catalogue
from orchestration.wiring import Ports


def answer_here(work: ToolWork, round_: int, ports: Ports) -> CallResult:
    """What the model reads of it, and its effect.

    Raises:
        UnknownAgent: the agent whose model asked is no longer declared.
    """
    record = work.record
    agent = ports.project.agent(record.asked_by)
    catalogue = round_catalogue(agent, work.request, ports, round_)
    tool = catalogue.own.get(record.name)
    if tool is None:
        message = f"{record.name} is no longer there; nothing happened"
        return CallResult(CallState.FAILED, dumps({"error": "unknown_tool", "message": message}), "unknown_tool")
    arguments = work.approved_arguments if work.approved_arguments is not None else record.arguments or {}
    return LoopAnswers(agent.output, catalogue.tools).answer(tool, arguments)
