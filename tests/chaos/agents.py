"""The agent of the chaos run: the ledger's obedient model, with gates that run out, and one tool that the workers serve themselves."""

from __future__ import annotations

import os
import time

from orchestration import Agent, Gate, Limits, discover, tool
from tests.fixtures.ledger import note
from tests.fixtures.ledger_agents import Obedient


@tool("ledger/own", timeout_s=30)
def own(key: str, sleep_s: float = 0.0) -> str:
    """Write an effect in the process of a worker, after a while."""
    time.sleep(sleep_s)
    note("effects", key)
    return f"owned {key}"


ledger = Agent(
    "ledger",
    Obedient(),
    tools=[discover("ledger/*")],
    approvals={"ledger/pay": Gate(timeout_s=float(os.environ["GATE_TIMEOUT_S"]))},
    limits=Limits(max_rounds=10),
)
