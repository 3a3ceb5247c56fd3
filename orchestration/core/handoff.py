"""Handoffs: an agent passes the conversation to another within the turn, by calling a tool named after it.

Here are the names, what a model is told of them, and what is refused when agents are declared; the loop answers the calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from orchestration.core.errors import Misconfigured
from orchestration.core.model import ToolDefinition
from orchestration.core.tool import tool_name

if TYPE_CHECKING:
    from orchestration.core.agent import Agent


def transfer_name(agent: str) -> str:
    """The tool with which a model hands over to `agent`."""
    return tool_name(f"transfer_to_{agent}")


def transfer_definition(agent: str, description: str) -> ToolDefinition:
    """That tool as a model is told of it."""
    about = f" It takes care of: {description}" if description else ""
    return {
        "type": "function",
        "function": {
            "name": transfer_name(agent),
            "description": f"Hand this conversation over to the agent {agent}, who goes on with it and sees all of it.{about}",
            "parameters": {"type": "object", "properties": {}},
        },
    }


def check_references(agents: Mapping[str, Agent]) -> None:
    """Refuse agents that name others which are not declared.

    Raises:
        Misconfigured: names both.
    """
    for agent in agents.values():
        for name in agent.handoffs:
            if name not in agents:
                raise Misconfigured(f"Agent({agent.name!r}): handoffs name {name!r}, which is no declared agent")
        for name in agent.nested_agents():
            if name not in agents:
                raise Misconfigured(f"Agent({agent.name!r}): AgentTool({name!r}) names no declared agent")
