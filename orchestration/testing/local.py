"""The whole of Turnmill in one process, without any service: the real journal on fakeredis, and a queue and a mesh
that are lists and functions.

For unit tests of agents. What only real processes can show (crashes, slow peers, many workers) belongs to `stack.py`.
"""

from __future__ import annotations

import base64
import inspect
import json
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import fakeredis
from pydantic import ValidationError

from orchestration.actions import cancel, decide, read, submit
from orchestration.actions.expire import expire, remind
from orchestration.core.agent import Agent
from orchestration.core.frames import numbered
from orchestration.core.ids import StepId, StepKind
from orchestration.core.keys import matches
from orchestration.core.local_calls import closest
from orchestration.core.outbound import Delivery, Way
from orchestration.core.principal import ALL_SCOPES, DEVELOPER, Principal, Scope
from orchestration.core.tool import Discover, Outcome, Tool, ToolAnswer, ToolQuery, ToolSpec
from orchestration.core.tool_error import ToolError
from orchestration.core.turn import StopReason
from orchestration.core.webhook import Webhook
from orchestration.mesh.hosting import answers
from orchestration.mesh.wire import decode_reply
from orchestration.models.loop_thread import loop_thread
from orchestration.models.scripted import ScriptEnded
from orchestration.outbound.deliver import deliver
from orchestration.project import collect
from orchestration.queue.names import QUEUES
from orchestration.settings import Settings
from orchestration.state.store import Store, approval_key, conversation_key
from orchestration.steps.decide import decide as decide_step
from orchestration.steps.observe import observe
from orchestration.steps.plan import plan
from orchestration.steps.tool import tool as tool_step
from orchestration.wiring import Ports, make_ports

log = logging.getLogger("turnmill.testing")

#: How often a run ends the pause of one step: what waits for longer waits for something that does not come by itself here.
MAX_PAUSES = 50


class LocalQueue:
    """The port `Queue` as a list of steps that wait to be run."""

    def __init__(self) -> None:
        self.waiting: deque[StepId] = deque()
        self.sent: list[StepId] = []
        self.outbound: deque[tuple[str, Delivery, int]] = deque()

    def send(self, steps: Sequence[StepId], *, headers: Sequence[int] | None = None, traceparent: str = "") -> None:
        self.waiting.extend(steps)
        self.sent.extend(steps)

    def ring(self, steps: Sequence[StepId]) -> dict[str, tuple[str, str]]:
        return {}

    def send_outbound(self, tenant: str, delivery: Delivery, attempt: int) -> None:
        self.outbound.append((tenant, delivery, attempt))

    def queue_name(self, kind: StepKind) -> str:
        return QUEUES[kind]

    def is_empty(self, kind: StepKind) -> bool:
        return not any(QUEUES[step.kind] == QUEUES[kind] for step in self.waiting)


class LocalMesh:
    """The port `Mesh` over plain `@tool` functions. What comes back is what a tool host would answer, down to its bytes."""

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
            return _heard(answers.of_invalid(error, correlation_id=query.call_id))
        try:
            value = tool.function(**arguments)
            if inspect.isawaitable(value):
                value = loop_thread.submit(value).result()
            return _heard(answers.of_result(value))
        except Exception as error:
            if not isinstance(error, ToolError):
                log.exception("the tool %s raised; the model reads 'internal_error'", query.prefix)
            return _heard(answers.of_exception(error, correlation_id=query.call_id))

    def discover(self, wishes: Sequence[Discover], *, sure: bool = False) -> list[ToolSpec]:
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


def _heard(answer: answers.Answer) -> ToolAnswer:
    return decode_reply(answer.payload, answer.encoding)


def _deadline(ports: Ports, tenant: str, turn_id: str) -> None:
    cancel.end_now(
        ports,
        tenant,
        turn_id,
        StopReason.DEADLINE,
        code="deadline",
        detail="the turn's time was up",
        due=f"deadline:{tenant}/{turn_id}",
    )


#: What comes of it when the time of an entry of this kind is up.
_TIMES: dict[str, Callable[[Ports, str, str], object]] = {"expire": expire, "remind": remind, "deadline": _deadline}


def _parts(entry: str) -> tuple[str, str, str]:
    """(kind, tenant, id) of an entry of what is due."""
    kind, _, name = entry.partition(":")
    tenant, _, id_ = name.partition("/")
    return kind, tenant, id_


def _fake_store(settings: Settings) -> Store:
    server = fakeredis.FakeServer()
    return Store(settings, connect=lambda: fakeredis.FakeRedis(server=server, decode_responses=True))


class LocalTurnmill:
    """Agents and tools in this process. `run()` works off what waits; nothing happens by itself.

    Args:
        declared: agents, tools and webhooks, as a module would declare them.
        principal: who submits and decides, unless another is named.
        settings: settings by name; with `redis_url` the journal is on that server, which should be empty.
    """

    def __init__(
        self,
        *declared: Agent | Tool[Any, Any] | Webhook,
        principal: Principal = DEVELOPER,
        on_approval_request: Callable[[dict[str, Any]], object] | None = None,
        **settings: Any,
    ) -> None:
        settings.setdefault("token_key", base64.b64encode(secrets.token_bytes(32)).decode())
        for name in settings:
            if name not in Settings.model_fields:
                near = closest(name, Settings.model_fields)
                raise TypeError(f"there is no setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        self.settings = Settings(**settings)
        self.project = replace(collect(declared, "this test"), on_approval_request=on_approval_request)
        self.queue = LocalQueue()
        self.mesh = LocalMesh(list(self.project.tools.values()))
        store = Store(self.settings) if "redis_url" in settings else _fake_store(self.settings)
        self.ports: Ports = make_ports(self.settings, self.project, store, self.queue, self.mesh)
        self.ports.lease.register()
        self.principal = principal
        self._submitted: list[str] = []

    def submit(self, agent: str, input: str | list[dict[str, Any]], **more: Any) -> submit.Submitted:
        """Submit a turn; see `Submission` for what may be given. It runs at the next `run()`."""
        submitted = submit.submit(self.ports, submit.Submission(agent, input, more.pop("principal", self.principal), **more))
        self._submitted.append(submitted.turn_id)
        return submitted

    def run(self) -> None:
        """Run steps until none waits, with what a deployment does by itself: chords are closed, pauses before another attempt are over
        at once, the turns of agents whose caller was cancelled end, `on_round` is called. Deadlines and expiries come only when
        their time has.

        Raises:
            ScriptEnded: a scripted model was asked for more than its script has.
        """
        paused: Counter[str] = Counter()
        while True:
            while self.queue.waiting:
                self.run_one(self.queue.waiting.popleft())
            undelivered = [StepId.parse(str(name)) for name in self.ports.store.client.zrange("tm:sent:plan", 0, -1)]
            self.queue.waiting.extend(step for step in undelivered if step.kind is StepKind.OBSERVE)
            for entry in map(str, self.ports.store.client.zrange("tm:due", 0, -1)):
                self._due(entry, paused)
            if not self.queue.waiting:
                break
        self._complain()

    def _due(self, entry: str, paused: Counter[str]) -> None:
        kind, _, name = entry.partition(":")
        if kind == "step" and paused[entry] < MAX_PAUSES:
            paused[entry] += 1
            self.queue.send(self.ports.outbox.promote(StepId.parse(name)))
        elif kind == "out" and Delivery.parse(name.partition("/")[2]).way is Way.ROUND and not paused[entry]:
            paused[entry] += 1
            self._tell_round(*name.split("/", 1))
        elif kind == "cancel":
            tenant, _, turn_id = name.partition("/")
            cancel.cancel_as_due(self.ports, tenant, turn_id)
            self.ports.store.client.zrem("tm:due", entry)

    def _tell_round(self, tenant: str, name: str) -> None:
        attempt = self.ports.outbound.to_send(tenant, name)
        if attempt is not None:
            deliver(self.ports, tenant, name, attempt.number)

    def _complain(self) -> None:
        """Raise what a test of an agent should not pass over: the mistakes of its script."""
        for turn_id in list(self._submitted):
            error, ended = self.ports.conversations.fields(self.principal.tenant, turn_id, "error", "ended")
            if error or ended:
                self._submitted.remove(turn_id)  # once is enough
            if ScriptEnded.__name__ in (error or ""):
                raise ScriptEnded(json.loads(error or "")["detail"])

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

    def person(self, sub: str, *roles: str) -> Principal:
        """Somebody with these roles, who may submit, read and decide: to be named as `principal` or `by`."""
        return Principal(sub, self.principal.tenant, roles, tuple(scope for scope in ALL_SCOPES if scope != Scope.ADMIN))

    def pass_time(self, seconds: float) -> None:
        """Let time pass for what waits, and run what comes of it: approvals expire or are reminded of, turns reach their deadline."""
        client, moved = self.ports.store.client, round(seconds * 1000)
        entries = [entry for entry in map(str, client.zrange("tm:due", 0, -1)) if entry.partition(":")[0] in _TIMES]
        for entry in entries:
            client.zincrby("tm:due", -moved, entry)
            kind, tenant, id_ = _parts(entry)
            if kind == "expire":
                client.hincrby(approval_key(tenant, id_), "expires_at", -moved)
        for entry in entries:
            at = client.zscore("tm:due", entry)
            if at is not None and float(str(at)) <= self.ports.approvals.now_ms():
                kind, tenant, id_ = _parts(entry)
                _TIMES[kind](self.ports, tenant, id_)
                client.zrem("tm:due", entry)
        self.run()

    def history(self, conversation_id: str) -> list[dict[str, Any]]:
        """What was said and done in a conversation, oldest first, in the API's shape."""
        return read.history(self.ports, self.principal.tenant, conversation_id)

    def cancel(self, turn_id: str) -> dict[str, Any]:
        """Cancel a turn."""
        return cancel.cancel_turn(self.ports, self.principal, turn_id)

    def frames(self, conversation_id: str, turn_id: str = "") -> list[dict[str, Any]]:
        """All frames of a conversation so far, in order; those of one turn, if it is named."""
        if turn_id:
            return [one for one in self.frames(conversation_id) if one["turn_id"] == turn_id]
        stored: Any = self.ports.store.client.xrange(f"{conversation_key(self.principal.tenant, conversation_id)}:frames")
        return [json.loads(numbered(int(id_.split("-")[0]), fields["f"])) for id_, fields in stored]
