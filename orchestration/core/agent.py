"""What a user declares as an agent. A plain value, checked when it is made; nothing here runs it. Webhooks are in `core/webhook.py`."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from orchestration.core.agent_tool import AgentTool
from orchestration.core.catalogue import catalogue_of
from orchestration.core.checkpoint import OnRound
from orchestration.core.compaction import AnyCompactor, ElideToolResults
from orchestration.core.errors import Invalid, Misconfigured
from orchestration.core.gate import Gate, missing_gates
from orchestration.core.hooks import OnTool, OnToolError
from orchestration.core.ids import is_id
from orchestration.core.keys import is_expression
from orchestration.core.limits import Limits
from orchestration.core.model import Model
from orchestration.core.output import AgentOutput
from orchestration.core.policy import Policy
from orchestration.core.tool import Discover, Tool, ToolSpec

# where these were declared once; the names work from here for one more release
from orchestration.core.webhook import StandardWebhooks as StandardWebhooks
from orchestration.core.webhook import Webhook as Webhook
from orchestration.core.webhook import WebhookRequest as WebhookRequest

#: What an agent takes as a tool.
ToolSource = ToolSpec | Discover | Tool[Any, Any] | AgentTool

#: The values that may be chosen among, by field.
_CHOICES = {
    "execution": ("parallel", "sequential"),
    "tool_loading": ("eager", "deferred"),
    "on_collision": ("refuse", "prefix"),
    "on_round_limit": ("stop", "answer"),
}


@dataclass(frozen=True, slots=True)
class Agent:
    """A name with a model, instructions, tools, gates and limits.

    `approvals` maps tool keys (or key expressions, or names) to a `Gate` that refines what the owner of a tool demands, and gates
    tools whose owner demands nothing; `approvals=None` says that there is nowhere to ask, and then an agent whose known
    tools include a gated one is refused. `policy` sees each call with its arguments and may deny it or have a human asked
    (`orchestration/core/policy.py`); it waives no gate. `models` are others, by name, that a submission may choose instead of `model`.

    Args:
        handoffs: agents of the same module that it may pass the conversation to.
        output: the class that its turns end on (see `AgentOutput`); None for text.
        execution: whether the calls of a round run side by side or one after the other.
        on_round_limit: at `limits.max_rounds` the turn stops, or the model is asked once more, without tools.
        tool_loading: whether a request carries all definitions, or a list of names and what `load_tools` loaded.
        always_loaded: tools, by name or key, whose definitions are sent even then.
        on_collision: tools of two services with one name are refused, or get their service's name in front.
        compact_after: input tokens of the last model call above which older history is compacted; None for never.
        keep_recent_rounds: rounds that a compaction leaves whole.
        compactor: how older history is rewritten (see `Compactor`).
        max_history_messages: messages of the history that are sent at most; None for all.
        on_tool, on_tool_error: what runs around its tool calls (see `core/hooks.py`).
        on_round: called with the conversation after each round and after the answer (see `core/checkpoint.py`).
        parameters: what clients of a channel may give in its query; None takes any texts. The model reads them beside the instructions.
        forward_token: queries of its tools carry the token (JWT) of whoever submitted the turn, instead of one that Turnmill signs. It is
            kept encrypted (`TURNMILL_TOKEN_KEY`) and deleted at the turn's end. API keys are never forwarded.

    Raises:
        Misconfigured: a name that is no id, an unknown kind of tool, a gated tool without anywhere to ask, two tools with one name,
            or a value that cannot work.
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
    policy: Policy | None = None
    output: AgentOutput[Any] | None = None
    execution: Literal["parallel", "sequential"] = "parallel"
    on_round_limit: Literal["stop", "answer"] = "stop"
    tool_loading: Literal["eager", "deferred"] = "eager"
    always_loaded: Sequence[str] = ()
    on_collision: Literal["refuse", "prefix"] = "refuse"
    compact_after: int | None = None
    keep_recent_rounds: int = 2
    compactor: AnyCompactor = field(default_factory=ElideToolResults)
    max_history_messages: int | None = None
    on_tool: OnTool | None = None
    on_tool_error: OnToolError | None = None
    on_round: OnRound | None = None
    parameters: type[BaseModel] | None = None
    forward_token: bool = False

    def __post_init__(self) -> None:
        if not is_id(self.name):
            raise Misconfigured(f"Agent({self.name!r}): a name is 1 to 64 characters of A-Z a-z 0-9 _ -")
        if not callable(getattr(self.model, "complete", None)):
            raise Misconfigured(f"Agent({self.name!r}): model {self.model!r} has no complete(messages, *, tools=None)")
        for source in self.tools:
            if not isinstance(source, (ToolSpec, Discover, Tool, AgentTool)):
                raise Misconfigured(f"Agent({self.name!r}): {source!r} is no tool; use MeshTool, @tool, AgentTool or discover(…)")
        for pattern, gate in (self.approvals or {}).items():
            if not is_expression(pattern):
                raise Misconfigured(f"Agent({self.name!r}): approvals[{pattern!r}] matches nothing; name a key such as 'billing/*'")
            if not isinstance(gate, Gate):
                raise Misconfigured(f"Agent({self.name!r}): approvals[{pattern!r}] is no Gate")
        if self.policy is not None and (not callable(self.policy) or inspect.iscoroutinefunction(self.policy)):
            raise Misconfigured(f"Agent({self.name!r}): policy is a plain function of one call, not {self.policy!r}")
        if self.parameters is not None and not (isinstance(self.parameters, type) and issubclass(self.parameters, BaseModel)):
            raise Misconfigured(f"Agent({self.name!r}): parameters is a class of pydantic's, not {self.parameters!r}")
        self._check_loop()
        if self.approvals is None:
            missing = missing_gates(self.known_tools())
            if missing:
                raise Misconfigured(f"Agent({self.name!r}): approvals=None, but these tools need one: {', '.join(missing)}")

    def _check_loop(self) -> None:
        """What the loop is told about this agent."""
        who = f"Agent({self.name!r}"
        if isinstance(self.handoffs, str) or isinstance(self.always_loaded, str):
            raise Misconfigured(f"{who}): handoffs and always_loaded are lists of names")
        object.__setattr__(self, "handoffs", tuple(to.name if isinstance(to, Agent) else to for to in self.handoffs))
        for to in self.handoffs:
            if not isinstance(to, str) or to == self.name or self.handoffs.count(to) > 1:
                raise Misconfigured(f"{who}): handoffs are the names of other agents, each once, not {to!r}")
        if isinstance(self.output, type):
            object.__setattr__(self, "output", AgentOutput(self.output))
        if self.output is not None and not isinstance(self.output, AgentOutput):
            raise Misconfigured(f"{who}): output is AgentOutput(YourModel), not {self.output!r}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise Misconfigured(f"{who}, {name}={getattr(self, name)!r}): one of {', '.join(choices)}")
        for name, least in (("compact_after", 1), ("keep_recent_rounds", 0), ("max_history_messages", 1)):
            value = getattr(self, name)
            optional = value is None and name != "keep_recent_rounds"
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise Misconfigured(f"{who}, {name}={value!r}): a whole number of at least {least}")
        if not callable(getattr(self.compactor, "compact", self.compactor)):
            raise Misconfigured(f"{who}): compactor has no compact(messages) and is no function")
        for name in ("on_tool", "on_tool_error"):
            hook = getattr(self, name)
            if hook is not None and (not callable(hook) or inspect.iscoroutinefunction(hook)):
                raise Misconfigured(f"{who}): {name} is a plain function")
        if self.on_round is not None and not callable(self.on_round):
            raise Misconfigured(f"{who}): on_round is a function of one checkpoint, sync or async")
        catalogue = catalogue_of(self, self.known_tools())
        if not self.discoveries():
            known = {*catalogue.tools, *(spec.prefix for spec in catalogue.tools.values())}
            for name in self.always_loaded:
                if name not in known:
                    raise Misconfigured(f"{who}): always_loaded names {name!r}, which is none of its tools")

    def system_for(self, brief: str) -> str:
        """Its instructions in a turn that brings a brief of its own."""
        return "\n\n".join(part for part in (self.system, brief) if part)

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
            if isinstance(source, (Tool, AgentTool)):
                known.append(source.spec)
            elif isinstance(source, ToolSpec):
                known.append(source)
        return known

    def of_others(self) -> list[ToolSpec]:
        """The tools declared by hand: their owners serve them elsewhere, and may demand more than is declared."""
        return [source for source in self.tools if isinstance(source, ToolSpec)]

    def nested_agents(self) -> list[str]:
        """The agents that it may ask as tools."""
        return [source.agent for source in self.tools if isinstance(source, AgentTool)]

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
            "output": [self.output.tool, self.output.schema] if self.output is not None else None,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
