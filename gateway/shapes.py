"""The shapes of answers, for the OpenAPI document. They describe what `orchestration/actions/` gives; nothing is built from them.

Members may be added to any of them in a later version, and clients are to ignore those that they do not know.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TurnStateName = Literal["queued", "running", "waiting", "completed", "failed", "cancelled"]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="allow")


class Accepted(_Shape):
    """A turn that is stored: `position` is 0 for one that runs, else its place in the mailbox."""

    turn_id: str
    conversation_id: str
    state: TurnStateName
    position: int


class Fault(_Shape):
    """What went wrong, with a stable code."""

    code: str
    detail: str


class TurnCall(_Shape):
    """One tool call of a turn."""

    call_id: str
    name: str
    arguments: dict[str, Any] | str = Field(description="an object; the text that the model wrote where that is none")
    state: Literal["requested", "waiting", "running", "completed", "failed", "denied", "expired", "cancelled", "unknown_outcome"]
    error: Fault | None
    started_at: str | None
    ended_at: str | None
    approval_id: str | None = None


class Turn(_Shape):
    """A turn: one input worked through to its end, which has a stop reason."""

    turn_id: str
    conversation_id: str
    agent: str
    state: TurnStateName
    stop_reason: str | None
    answer: str | None
    output: Any
    error: Fault | None
    rounds: int
    usage: dict[str, Any]
    calls: list[TurnCall]
    metadata: dict[str, Any]
    created_at: str | None
    started_at: str | None
    ended_at: str | None


class Conversation(_Shape):
    """A conversation: its agent, and what runs and waits in it."""

    conversation_id: str
    agent: str
    running_turn_id: str | None
    waiting_turns: int
    entries: int
    last_seq: int
    created_at: str | None
    updated_at: str | None


class HistoryEntry(_Shape):
    """One entry of a conversation; `n` is its number from 0."""

    n: int
    dir: Literal["in", "out"]
    data: Any
    ts: str | None
    turn_id: str


class History(_Shape):
    """The newest entries of a conversation, oldest first."""

    history: list[HistoryEntry]


class AgentTool(_Shape):
    """One tool of an agent; `approval` is what its gate demands, null for none."""

    name: str
    prefix: str
    description: str
    schema_: dict[str, Any] = Field(alias="schema")
    approval: dict[str, Any] | None


class AgentShape(_Shape):
    """An agent; `snapshot` is the hash of what it is made of."""

    model_config = ConfigDict(title="Agent")

    name: str
    description: str
    tools: list[AgentTool]
    limits: dict[str, Any]
    snapshot: str


class AgentList(_Shape):
    """All agents."""

    agents: list[AgentShape]


class Ticket(_Shape):
    """A ticket: good once, until `expires_at`, as the query parameter `ticket` of streams and channels."""

    ticket: str
    expires_at: str


class Health(_Shape):
    """Whether a process lives, or is ready; `checks` says which part does not answer."""

    status: str
    checks: dict[str, str] | None = None
