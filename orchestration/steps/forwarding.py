"""Which token a tool call's query carries: the caller's own, where the agent forwards it, else the one that Turnmill signs."""

from __future__ import annotations

import time

from orchestration.core.errors import Unauthorized
from orchestration.state.journal import ToolWork
from orchestration.wiring import Ports


def forwarded_token(work: ToolWork, ports: Ports) -> str:
    """The token (JWT) with which the turn was submitted, for an agent with `forward_token`; empty where Turnmill's own is to be used: for
    other agents, for callers who have none (an API key is never forwarded), and for the tools that our workers serve themselves.

    Raises:
        Unauthorized: there was one and it no longer holds. The tool must not be asked in another name then.
        StoreUnavailable
    """
    record, request = work.record, work.request
    agent = ports.project.agents.get(record.asked_by)
    if agent is None or not agent.forward_token or record.prefix in ports.project.tools:
        return ""
    kept = ports.conversations.callers_token(request.tenant, request.turn_id)
    if kept is None:
        return ""
    if not kept.sealed or time.time() * 1000 >= kept.expires_ms:
        raise Unauthorized("the token of whoever asked has expired; the tool was not asked")
    return ports.seal.open(kept.sealed, request.principal)
