"""What an agent may hang around its tool calls: a manager that is entered before a tool is asked, and its own words for a failure.

Both run in the worker, in the middle of a tool step, for calls that go to the mesh; those that the loop answers itself, or that
never run, pass neither.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from orchestration.core.call import CallResult
from orchestration.core.tool_error import ToolError


@dataclass(slots=True)
class ToolContext:
    """One call, as a hook sees it. `arguments` are those that are about to run, so the approved ones; they are a copy.

    `result` is None until the call has ended and is set before the manager is left. `attempt` counts how often the step was begun.
    """

    call_id: str
    name: str
    prefix: str
    agent: str
    turn_id: str
    conversation_id: str
    attempt: int
    arguments: dict[str, Any] = field(default_factory=dict)
    result: CallResult | None = None


#: Around each call: `on_tool(call)` returns a context manager. When entering it raises, the tool is not asked.
OnTool = Callable[[ToolContext], AbstractContextManager[Any]]

#: `on_tool_error(tool, arguments, error)` returns what the model reads of a failed call.
OnToolError = Callable[[ToolContext, dict[str, Any], ToolError], str]
