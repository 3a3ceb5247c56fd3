"""The agent's own hooks around a tool call. A hook that fails is a fault of the agent's module: it is logged, and costs no turn."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy

from orchestration.core.call import CallResult
from orchestration.core.hooks import ToolContext
from orchestration.core.safe_json import clean_text
from orchestration.core.tool import Outcome, ToolAnswer
from orchestration.core.tool_error import ToolError
from orchestration.state.journal import Claim, ToolWork
from orchestration.wiring import Ports

log = logging.getLogger("turnmill.steps")


def asked_within(
    claim: Claim, work: ToolWork, ports: Ports, ask: Callable[[], ToolAnswer], result_of: Callable[[ToolAnswer], CallResult]
) -> ToolAnswer:
    """`ask()` within the agent's `on_tool`. When entering that raises, the tool is not asked; when leaving it does, the answer stands."""
    agent = ports.project.agents.get(work.record.asked_by)
    if agent is None or agent.on_tool is None:
        return ask()
    context = _context(claim, work)
    try:
        manager = agent.on_tool(context)
        manager.__enter__()
    except Exception as error:
        _log(claim, "on_tool", error)
        message = "a hook of the agent's failed before the tool was asked; it did not run"
        return ToolAnswer(Outcome.NOT_RUN, code="hook_failed", message=message)
    answer = ToolAnswer(Outcome.UNKNOWN, code="internal_error")
    try:
        answer = ask()
        return answer
    finally:
        context.result = result_of(answer)
        try:
            manager.__exit__(None, None, None)
        except Exception as error:
            _log(claim, "on_tool", error)


def in_own_words(claim: Claim, work: ToolWork, ports: Ports, answer: ToolAnswer, result: CallResult) -> CallResult:
    """`result` in the words of the agent's `on_tool_error`, where it is a failure. An unknown outcome keeps its own words, since what
    the model does next depends on them."""
    agent = ports.project.agents.get(work.record.asked_by)
    if agent is None or agent.on_tool_error is None or answer.outcome not in (Outcome.FAILED, Outcome.NOT_RUN):
        return result
    context = _context(claim, work)
    context.result = result
    try:
        said = agent.on_tool_error(context, context.arguments, ToolError(answer.code or "failed", answer.message))
    except Exception as error:
        _log(claim, "on_tool_error", error)
        return result
    return CallResult(result.state, clean_text(said), result.code) if isinstance(said, str) else result


def _context(claim: Claim, work: ToolWork) -> ToolContext:
    record, request = work.record, work.request
    runs = work.approved_arguments if work.approved_arguments is not None else record.arguments or {}
    return ToolContext(
        call_id=record.call_id,
        name=record.name,
        prefix=record.prefix,
        agent=record.asked_by,
        turn_id=request.turn_id,
        conversation_id=request.conversation_id,
        attempt=claim.attempt,
        arguments=deepcopy(runs),
    )


def _log(claim: Claim, hook: str, error: Exception) -> None:
    log.error("step %s: the agent's %s raised %s", claim.step.task_id, hook, type(error).__name__)
