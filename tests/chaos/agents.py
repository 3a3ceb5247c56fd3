"""The agents of the chaos run: the ledger's obedient model with gates that run out or are held, agents that hand over to one another or
ask a third one, and tools that the workers serve themselves."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orchestration import Agent, AgentTool, Gate, Limits, ModelReply, discover, tool
from tests.fixtures.ledger import note
from tests.fixtures.ledger_agents import Obedient


@tool("ledger/own", timeout_s=30)
def own(key: str, sleep_s: float = 0.0) -> str:
    """Write an effect in the process of a worker, after a while."""
    time.sleep(sleep_s)
    note("effects", key)
    return f"owned {key}"


@tool("ledger/keep", idempotent=True, timeout_s=30)
def keep(key: str, sleep_s: float = 0.0) -> str:
    """Write an effect in the process of a worker; safe to repeat."""
    time.sleep(sleep_s)
    note("effects", key)
    return f"kept {key}"


class Mover(Obedient):
    """The obedient model; where its script says `transfer` it hands over to whom it may."""

    def complete(self, messages: Sequence[dict[str, Any]], *, tools: Any = None, sink: Any = None) -> ModelReply:
        reply = super().complete(messages, tools=tools, sink=sink)
        ways = [name for name in (definition["function"]["name"] for definition in tools or ()) if name.startswith("transfer_to_")]
        calls = tuple(replace(call, name=ways[0]) if ways and call.name == "ledger-transfer" else call for call in reply.tool_calls)
        return replace(reply, tool_calls=calls)


GATES = {
    "ledger/pay": Gate(timeout_s=float(os.environ["GATE_TIMEOUT_S"])),
    "ledger/sign": Gate(timeout_s=float(os.environ["HOLD_AFTER_S"]), on_expiry="hold"),
}
LIMITS = Limits(max_rounds=12)

helper = Agent("helper", Obedient(), tools=[discover("ledger/*")], approvals=GATES, limits=LIMITS)

#: These two have the same tools, and either may hand a conversation over to the other.
ledger, front = (
    Agent(
        name,
        Mover(),
        tools=[discover("ledger/*"), AgentTool("helper", name="ledger-agent")],
        approvals=GATES,
        handoffs=[other],
        limits=LIMITS,
    )
    for name, other in (("ledger", "front"), ("front", "ledger"))
)
