"""What a user declares: agents and webhooks. Plain values, checked when they are made; nothing here runs them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestration.core.errors import Invalid, Misconfigured
from orchestration.core.gate import Gate, missing_gates
from orchestration.core.ids import is_id
from orchestration.core.limits import Limits
from orchestration.core.model import Model
from orchestration.core.tool import Discover, Tool, ToolSpec

#: What an agent takes as a tool.
ToolSource = ToolSpec | Discover | Tool[Any, Any]


@dataclass(frozen=True, slots=True)
class Agent:
    """A name with a model, instructions, tools, gates and limits.

    `approvals` maps tool keys (or key expressions) to a `Gate` that refines what the owner of a tool demands, and gates
    tools whose owner demands nothing; `approvals=None` says that there is nowhere to ask, and then an agent whose known
    tools include a gated one is refused. `models` are others, by name, that a submission may choose instead of `model`.

    Raises:
        Misconfigured: a name that is no id, an unknown kind of tool, or a gated tool without anywhere to ask.
    """

    name: str
    model: Model
    tools: Sequence[ToolSource] = ()
    system: str = ""
    description: str = ""
    handoffs: Sequence[str] = ()
    approvals: dict[str, Gate] | None = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    on_busy_waiting: str | None = None
    models: dict[str, Model] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_id(self.name):
            raise Misconfigured(f"Agent({self.name!r}): a name is 1 to 64 characters of A-Z a-z 0-9 _ -")
        if not callable(getattr(self.model, "complete", None)):
            raise Misconfigured(f"Agent({self.name!r}): model {self.model!r} has no complete(messages, *, tools=None)")
        for source in self.tools:
            if not isinstance(source, (ToolSpec, Discover, Tool)):
                raise Misconfigured(f"Agent({self.name!r}): {source!r} is no tool; use MeshTool, @tool or discover(…)")
        if self.approvals is None:
            missing = missing_gates(self.known_tools())
            if missing:
                raise Misconfigured(f"Agent({self.name!r}): approvals=None, but these tools need one: {', '.join(missing)}")

    def model_named(self, name: str) -> Model:
        """The model that a submission asked for by name; the agent's own for none.

        Raises:
            Invalid: the agent does not allow it.
        """
        if not name or name == getattr(self.model, "model", None):
            return self.model
        if name not in self.models:
            raise Invalid("the agent does not allow this model", [{"loc": ["model"], "msg": f"one of {sorted(self.models)}"}])
        return self.models[name]

    def known_tools(self) -> list[ToolSpec]:
        """The tools that are known without asking the mesh."""
        known: list[ToolSpec] = []
        for source in self.tools:
            if isinstance(source, Tool):
                known.append(source.spec)
            elif isinstance(source, ToolSpec):
                known.append(source)
        return known

    def discoveries(self) -> list[Discover]:
        """The wishes that only the mesh can answer."""
        return [source for source in self.tools if isinstance(source, Discover)]

    def snapshot(self) -> str:
        """The hash of what the agent is made of: prompt template, own tools, model, limits. The same in every process
        that loaded the same module."""
        parts = {
            "name": self.name,
            "system": self.system,
            "model": str(getattr(self.model, "model", type(self.model).__name__)),
            "handoffs": list(self.handoffs),
            "tools": [[spec.prefix, spec.description, spec.parameters, spec.approval] for spec in self.known_tools()],
            "discover": [list(wish.patterns) for wish in self.discoveries()],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class StandardWebhooks:
    """The Standard Webhooks signature scheme (standardwebhooks.com). `secret_env` names the environment variable with
    the `whsec_…` secret; several, space-separated in it, are all valid while a secret is changed."""

    secret_env: str


@dataclass(frozen=True, slots=True)
class WebhookRequest:
    """A verified request, as `to_turn` sees it: the parsed body, the raw one, and the headers with lower-case names."""

    json: Any
    body: bytes
    headers: dict[str, str]
    query: dict[str, str]


@dataclass(frozen=True, slots=True)
class Webhook:
    """A door for signed requests at `/v1/webhooks/{name}`: which agent answers, for which principal and tenant, and
    how a request becomes a turn.

    `to_turn` returns a dict with `input` and perhaps `conversation_id`, `brief`, `metadata`, `callback_url`, or None for a
    request that means no turn.
    """

    name: str
    agent: str
    scheme: Any
    principal: str
    tenant: str
    to_turn: Callable[[WebhookRequest], dict[str, Any] | None]

    def __post_init__(self) -> None:
        for what, value in (("name", self.name), ("agent", self.agent), ("tenant", self.tenant)):
            if not is_id(value):
                raise Misconfigured(f"Webhook({self.name!r}): {what} {value!r} is 1 to 64 characters of A-Z a-z 0-9 _ -")
