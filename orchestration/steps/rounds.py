"""Tell an agent's `on_round` of each round that has ended. It is a watcher: what it raises is logged, and costs no turn."""

from __future__ import annotations

import threading

from orchestration.core.checkpoint import checkpoint
from orchestration.outbound.functions import call
from orchestration.state.journal import Claim, TurnSoFar
from orchestration.wiring import Ports

#: Calls that run or hang at a time in this process: each thread of a pool has at most one that it waits for.
MAX_AT_ONCE = 512

_room = threading.Semaphore(MAX_AT_ONCE)


def tell_round(claim: Claim, turn: TurnSoFar, ports: Ports) -> None:
    """Call `on_round` of the agent that goes on, with the round before the claimed plan; returns when it has, or takes too long."""
    agent = ports.project.agents.get(turn.agent)
    if agent is None or agent.on_round is None or claim.step.round < 2:
        return
    made = checkpoint(
        turn.entries,
        conversation_id=turn.request.conversation_id,
        turn_id=claim.step.turn_id,
        agent=agent.name,
        system=agent.system_for(turn.request.brief),
        round_=claim.step.round - 1,
        view=turn.view,
        spent=turn.conversation_spent,
    )
    call(agent.on_round, made, room=_room)
