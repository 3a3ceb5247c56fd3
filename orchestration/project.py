"""A user's module: the agents, webhooks and tools that it declares, found by looking through its names."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestration.core.agent import Agent
from orchestration.core.errors import Misconfigured, UnknownAgent
from orchestration.core.handoff import check_references
from orchestration.core.tool import Tool
from orchestration.core.webhook import Webhook

log = logging.getLogger("turnmill.project")


@dataclass(frozen=True, slots=True)
class Project:
    """What one agents' module declares.

    `on_approval_request` is the function of that name, if there is one: a worker calls it with each approval (a dict in the
    API's shape) that a human is asked for.
    """

    agents: dict[str, Agent] = field(default_factory=dict)
    webhooks: dict[str, Webhook] = field(default_factory=dict)
    tools: dict[str, Tool[Any, Any]] = field(default_factory=dict)
    on_approval_request: Callable[[dict[str, Any]], object] | None = None
    _snapshots: dict[str, str] = field(default_factory=dict)
    _warned: set[tuple[str, str]] = field(default_factory=set)

    def agent(self, name: str) -> Agent:
        """The agent of this name; raises UnknownAgent."""
        found = self.agents.get(name)
        if found is None:
            raise UnknownAgent(f"there is no agent {name!r}")
        return found

    def forwards(self, name: str) -> bool:
        """Whether this agent, or one that a turn of it can come to (by a handoff, or as a tool), forwards its caller's token."""
        seen, waiting = set(), [name]
        while waiting:
            agent = self.agents.get(waiting.pop())
            if agent is None or agent.name in seen:
                continue
            if agent.forward_token:
                return True
            seen.add(agent.name)
            waiting += [*agent.handoffs, *agent.nested_agents()]
        return False

    def compare(self, name: str, snapshot: str) -> None:
        """Log a warning, once, when whoever submitted a turn knows another `name` than this process does."""
        ours = self.snapshot(name) if name in self.agents else "none"
        if snapshot and snapshot != ours and (name, snapshot) not in self._warned:
            self._warned.add((name, snapshot))
            log.warning("agent %s: the submitter's snapshot is %s, ours %s; gateway and workers run different code", name, snapshot, ours)

    def snapshot(self, name: str) -> str:
        """The snapshot hash of one agent; raises UnknownAgent."""
        if name not in self._snapshots:
            self._snapshots[name] = self.agent(name).snapshot()
        return self._snapshots[name]


def load_project(dotted: str) -> Project:
    """The declarations of the module at `dotted`; an empty path gives an empty project.

    The current directory counts as a place to import from, as it does for `python -m`.

    Raises:
        Misconfigured: the module cannot be imported, declares something twice, or names an agent that it does not declare.
    """
    if not dotted:
        return Project()
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(dotted)
    except Misconfigured:
        raise
    except Exception as error:
        raise Misconfigured(f"TURNMILL_AGENTS: cannot import {dotted!r}: {type(error).__name__}: {error}") from error
    hook = vars(module).get("on_approval_request")
    if hook is not None and not callable(hook):
        raise Misconfigured(f"{dotted}: on_approval_request is {hook!r}, not a function of one approval")
    return replace(collect(vars(module).values(), dotted), on_approval_request=hook)


def collect(values: Iterable[object], where: str) -> Project:
    """The project that `values` make up; see `load_project` for what is refused."""
    project = Project()
    for value in values:
        if isinstance(value, Agent):
            _add(project.agents, value.name, value, f"{where}: two agents are called")
        elif isinstance(value, Webhook):
            _add(project.webhooks, value.name, value, f"{where}: two webhooks are called")
        elif isinstance(value, Tool):
            _add(project.tools, value.spec.prefix, value, f"{where}: two tools serve")
    for webhook in project.webhooks.values():
        if webhook.agent not in project.agents:
            raise Misconfigured(f"{where}: webhook {webhook.name!r} names the agent {webhook.agent!r}, which is not declared")
    check_references(project.agents)
    for agent in list(project.agents.values()):
        for tool in agent.tools:
            if isinstance(tool, Tool):
                project.tools.setdefault(tool.spec.prefix, tool)
    return project


def _add(known: dict[str, Any], name: str, value: object, fault: str) -> None:
    if known.setdefault(name, value) is not value:
        raise Misconfigured(f"{fault} {name!r}")
