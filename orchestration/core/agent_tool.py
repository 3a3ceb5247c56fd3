"""An agent as a tool of another: the call is a turn of its own, in a conversation of its own, and its answer is the tool's result.

The parent's tool step starts that turn and holds nothing while it runs; the journal settles the call when the turn ends. Ids are
made from the call's, so that a step done twice starts one turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestration.core.accounts import Account
from orchestration.core.call import CallRecord, CallResult, CallState
from orchestration.core.errors import Misconfigured
from orchestration.core.ids import is_id
from orchestration.core.safe_json import dumps
from orchestration.core.tool import ToolSpec, tool_name
from orchestration.core.turn import TurnRequest

#: How deep agents may ask one another; a call beyond is refused.
MAX_DEPTH = 5

_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string", "minLength": 1, "description": "the whole task: the agent sees nothing else"}},
    "required": ["input"],
}


@dataclass(frozen=True, slots=True)
class AgentTool:
    """Another agent of the same module, offered as the tool `agent-<name>`; its key for gates and policies is `agent/<name>`.

    Args:
        agent: its name.
        description: what the model reads; by default the agent's own description.
        approval: True, or the reason why a human must agree before it is asked.
        name: another name for the tool.

    Raises:
        Misconfigured: a name that cannot be one.
    """

    agent: str
    description: str = ""
    approval: bool | str | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.agent, str) or not is_id(self.agent):
            raise Misconfigured(f"AgentTool({self.agent!r}): the name of an agent")
        if self.name and self.name != tool_name(self.name):
            raise Misconfigured(f"AgentTool({self.agent!r}, name={self.name!r}): 1 to 64 characters of A-Z a-z 0-9 _ -")

    @property
    def spec(self) -> ToolSpec:
        """The tool as a catalogue knows it. Starting its turn twice is starting it once, so it counts as idempotent."""
        return ToolSpec(
            prefix=f"agent/{self.agent}",
            description=self.description,
            parameters=_PARAMETERS,
            approval=self.approval or None,
            idempotent=True,
            name=self.name,
            agent=self.agent,
        )


@dataclass(frozen=True, slots=True)
class Parent:
    """The call for which a turn runs: whose it is, and how deep it lies below the turn that a user submitted."""

    turn_id: str
    round: int
    index: int
    call_id: str
    name: str
    depth: int

    def as_json(self) -> dict[str, Any]:
        """A JSON object; `Parent(**…)` takes it back."""
        return asdict(self)


def parent_of(request: TurnRequest) -> Parent | None:
    """The call that a turn was started for, if it was."""
    return Parent(**request.parent) if request.parent else None


def depth_of(request: TurnRequest) -> int:
    """How deep a turn lies: 0 for one that somebody submitted."""
    parent = parent_of(request)
    return parent.depth if parent else 0


def child_turn_id(call_id: str) -> str:
    """The turn that answers a call of an agent, once it was started."""
    return f"tn_{_digest(call_id)[:24]}"


def _digest(call_id: str) -> str:
    return hashlib.sha256(call_id.encode()).hexdigest()


def child_request(
    request: TurnRequest, record: CallRecord, arguments: dict[str, Any], round_: int, index: int, accounts: Sequence[Account]
) -> TurnRequest:
    """The turn that answers a call of an agent, for the same principal, on the `accounts` of those above it."""
    parent = Parent(request.turn_id, round_, index, record.call_id, record.name, depth_of(request) + 1)
    return TurnRequest(
        turn_id=child_turn_id(record.call_id),
        tenant=request.tenant,
        agent=record.agent,
        conversation_id=f"cv_{_digest(record.call_id)[24:48]}",
        principal=request.principal,
        input=str(arguments.get("input", "")),
        callback_url=request.callback_url,  # its approvals are told there; its end is the caller's business
        traceparent=request.traceparent,
        parent=parent.as_json(),
        accounts=[account.as_json() for account in accounts],
    )


def too_deep(name: str) -> CallResult:
    """What the model reads when agents have asked one another too deeply."""
    message = f"agents may ask one another {MAX_DEPTH} levels deep; {name} was not asked. Do the work yourself."
    return CallResult(CallState.FAILED, dumps({"error": "too_deep", "message": message}), "too_deep")


def told_to_parent(answer: str, output: str) -> CallResult:
    """What the caller's model reads of a turn that ended well: its typed answer as JSON, else its text."""
    return CallResult(CallState.COMPLETED, output or answer)
