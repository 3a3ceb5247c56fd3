"""Routes of agents: which there are, and what each is made of."""

from __future__ import annotations

from fastapi import APIRouter, Response

from gateway.auth import ReadsTurns
from gateway.bodies import json_answer
from gateway.parts import GatewayParts
from gateway.shapes import AgentList, AgentShape
from orchestration.actions import read
from orchestration.core.errors import UnknownAgent
from orchestration.core.ids import is_id

router = APIRouter(prefix="/v1/agents", tags=["agents"])


@router.get("", summary="List the agents", response_model=AgentList)
def list_agents(_principal: ReadsTurns, parts: GatewayParts) -> Response:
    """All agents that are declared."""
    return json_answer({"agents": read.agent_list(parts.ports)})


@router.get("/{name}", summary="Read an agent", response_model=AgentShape)
def get_agent(name: str, _principal: ReadsTurns, parts: GatewayParts) -> Response:
    """One agent with its tools, gates and limits, and the hash of what it is made of."""
    if not is_id(name):
        raise UnknownAgent("there is no such agent")
    return json_answer(read.agent(parts.ports, name))
