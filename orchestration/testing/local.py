"""The whole of Turnmill in one process, without any service: the real journal on fakeredis, and a queue and a mesh
that are lists and functions.

For unit tests of agents. What only real processes can show (crashes, slow peers, many workers) belongs to `stack.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import fakeredis
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from orchestration.actions import cancel, decide, read, submit
from orchestration.core.agent import Agent
from orchestration.core.frames import numbered
from orchestration.core.ids import StepId, StepKind
from orchestration.core.keys import matches
from orchestration.core.principal import DEVELOPER, Principal
from orchestration.core.tool import Discover, Outcome, Tool, ToolAnswer, ToolQuery, ToolSpec
from orchestration.project import collect
from orchestration.queue.names import QUEUES
from orchestration.settings import Settings
from orchestration.state.store import Store, conversation_key
from orchestration.steps.decide import decide as decide_step
from orchestration.steps.observe import observe
from orchestration.steps.plan import plan
from orchestration.steps.tool import tool as tool_step
from orchestration.wiring import Ports, make_ports


class LocalQueue:
    """The port `Queue` as a list of steps that wait to be run."""

    def __init__(self) -> None:
        self.waiting: deque[StepId] = deque()
        self.sent: list[StepId] = []

    def send(self, steps: Sequence[StepId], *, headers: Sequence[int] | None = None, traceparent: str = "") -> None:
        self.waiting.extend(steps)
        self.sent.extend(steps)

    def ring(self, steps: Sequence[StepId]) -> dict[str, tuple[str, str]]:
        return {}

    def queue_name(self, kind: StepKind) -> str:
        return QUEUES[kind]

    def is_empty(self, kind: StepKind) -> bool:
        return not any(QUEUES[step.kind] == QUEUES[kind] for step in self.waiting)


class LocalMesh:
    """The port `Mesh` over plain `@tool` functions."""

    def __init__(self, tools: Sequence[Tool[Any, Any]] = ()) -> None:
        self.tools = {tool.spec.prefix: tool for tool in tools}
        self.asked: list[ToolQuery] = []

    def ask(self, query: ToolQuery) -> ToolAnswer:
        self.asked.append(query)
        tool = self.tools.get(query.prefix)
        if tool is None:
            return ToolAnswer(Outcome.NOT_RUN, code="not_found", message=f"nobody serves {query.prefix}")
        try:
            arguments = tool.validate(query.arguments)
        except ValidationError as error:
            details = error.errors(include_input=False, include_url=False, include_context=False)
            return ToolAnswer(
                Outcome.FAILED, code="validation_error", message="the arguments do not fit", details=to_jsonable_python(details)
            )
        try:
            value = tool.function(**arguments)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
        except Exception:
            return ToolAnswer(Outcome.FAILED, code="internal_error", message="Internal error")
        return ToolAnswer(Outcome.COMPLETED, to_jsonable_python(value, fallback=repr))

    def discover(self, wishes: Sequence[Discover]) -> list[ToolSpec]:
        patterns = [pattern for wish in wishes for pattern in wish.patterns]
        return [tool.spec for prefix, tool in sorted(self.tools.items()) if any(matches(pattern, prefix) for pattern in patterns)]

    def serve(self, tools: Sequence[Tool[..., Any]]) -> None:
        """Serve more tools."""
        self.tools |= {tool.spec.prefix: tool for tool in tools}

    def close(self) -> None:
        """There is nothing to close."""

    def announce_process(self, process: str) -> None:
        """Nobody listens here."""

    def watch_processes(self, on_drop: Callable[[str], object]) -> None:
        """Nobody dies here."""


async def _awaited(value: Any) -> Any:
    return await value


class LocalTurnmill:
    """Agents and tools in this process. `run()` works off what waits; nothing happens by itself."""

    def __init__(self, *declared: Agent | Tool[Any, Any], principal: Principal = DEVELOPER, **settings: Any) -> None:
        server = fakeredis.FakeServer()
        self.settings = Settings(**settings)
        self.project = collect(declared, "this test")
        self.queue = LocalQueue()
        self.mesh = LocalMesh(list(self.project.tools.values()))
        store = Store(self.settings, connect=lambda: fakeredis.FakeRedis(server=server, decode_responses=True))
        self.ports: Ports = make_ports(self.settings, self.project, store, self.queue, self.mesh)
        self.ports.lease.register()
        self.principal = principal

    def submit(self, agent: str, input: str | list[dict[str, Any]], **more: Any) -> submit.Submitted:
        """Submit a turn; see `Submission` for what may be given. It runs at the next `run()`."""
        return submit.submit(self.ports, submit.Submission(agent, input, more.pop("principal", self.principal), **more))

    def run(self) -> None:
        """Run steps until none waits; the end of a round with an approval is delivered as its chord's body would be."""
        while True:
            while self.queue.waiting:
                self.run_one(self.queue.waiting.popleft())
            undelivered = [StepId.parse(str(name)) for name in self.ports.store.client.zrange("tm:sent:plan", 0, -1)]
            self.queue.waiting.extend(step for step in undelivered if step.kind is StepKind.OBSERVE)
            if not self.queue.waiting:
                return

    def run_one(self, step: StepId) -> str:
        """Run one step, as its task would; a step may be given any number of times."""
        if step.kind is StepKind.PLAN:
            return plan(step, self.ports)
        if step.kind is StepKind.TOOL:
            return tool_step(step, self.ports)
        if step.kind is StepKind.OBSERVE:
            return observe(step, self.ports)
        decide_step(step, self.ports)
        return "decided"

    def ask(self, agent: str, input: str | list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Submit, run, and return the turn in the API's shape."""
        submitted = self.submit(agent, input, **more)
        self.run()
        return self.turn(submitted.turn_id)

    def turn(self, turn_id: str) -> dict[str, Any]:
        """A turn in the API's shape."""
        return read.turn(self.ports, self.principal.tenant, turn_id)

    def approvals(self) -> list[dict[str, Any]]:
        """The undecided approvals, oldest first."""
        found: list[dict[str, Any]] = read.approvals(self.ports, self.principal.tenant)["approvals"]
        return found

    def decide(self, approval_id: str, approved: bool, *, by: Principal | None = None, **more: Any) -> dict[str, Any]:
        """Decide an approval; its call runs at the next `run()`."""
        return decide.decide(self.ports, by or self.principal, approval_id, approved, **more)

    def cancel(self, turn_id: str) -> dict[str, Any]:
        """Cancel a turn."""
        return cancel.cancel_turn(self.ports, self.principal, turn_id)

    def frames(self, conversation_id: str) -> list[dict[str, Any]]:
        """All frames of a conversation so far, in order."""
        stored: Any = self.ports.store.client.xrange(f"{conversation_key(self.principal.tenant, conversation_id)}:frames")
        return [json.loads(numbered(int(id_.split("-")[0]), fields["f"])) for id_, fields in stored]
