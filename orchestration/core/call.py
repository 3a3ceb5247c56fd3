"""One tool call: its states and what is recorded of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from orchestration.core.gate import Gate


class CallState(StrEnum):
    """Where one tool call stands. All but the first three are ends and never change."""

    REQUESTED = "requested"  #: the model asked for it; no step has claimed it
    WAITING = "waiting"  #: suspended until a human decides; holds no worker
    RUNNING = "running"  #: claimed; the mesh may have been asked
    COMPLETED = "completed"  #: the tool answered
    FAILED = "failed"  #: it was refused, or the tool said that it failed
    DENIED = "denied"  #: a human, or the agent's policy, said no; it never ran
    EXPIRED = "expired"  #: nobody decided in time; it never ran
    CANCELLED = "cancelled"  #: cancelled before it was claimed; it never ran
    UNKNOWN_OUTCOME = "unknown_outcome"  #: asked, but nobody knows what came of it


OPEN_CALLS = frozenset({CallState.REQUESTED, CallState.WAITING, CallState.RUNNING})


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call as its round was opened: what was asked, of whom, and under which rule.

    `asked_by` is the agent whose model asked. A call whose `loop` is set (a word of `core/local_calls.py`) is answered by the
    loop itself, one with `agent` by the agent of that name; every other goes to the mesh.
    """

    call_id: str
    name: str
    prefix: str
    arguments: dict[str, Any] | None
    raw_arguments: str = ""
    idempotent: bool = False
    payload: bool = False
    timeout_s: float = 5.0
    schema: dict[str, Any] = field(default_factory=dict)
    approval_id: str = ""
    gate: Gate | None = None
    asked_by: str = ""
    agent: str = ""
    loop: str = ""

    def as_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` takes it back."""
        data = {name: getattr(self, name) for name in self.__slots__}
        data["gate"] = self.gate.as_json() if self.gate else None
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CallRecord:
        known = {name: data[name] for name in cls.__slots__ if name in data}
        known["gate"] = Gate(**data["gate"]) if data.get("gate") else None
        return cls(**known)


@dataclass(frozen=True, slots=True)
class CallResult:
    """How a call ended: the whole content (text), whether it is an error, and its code then.

    `effect` is what follows for the turn from a call that the loop answered itself: `{"output": …}`, `{"loaded": […]}` or
    `{"handoff": name}`.
    """

    state: CallState
    content: str
    code: str = ""
    effect: dict[str, Any] | None = None

    @property
    def error(self) -> bool:
        """Whether the model reads this as a failure."""
        return self.state is not CallState.COMPLETED

    def as_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` takes it back."""
        data: dict[str, Any] = {"state": str(self.state), "content": self.content, "code": self.code}
        return data | {"effect": self.effect} if self.effect is not None else data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CallResult:
        return cls(CallState(data["state"]), data["content"], data.get("code", ""), data.get("effect"))
