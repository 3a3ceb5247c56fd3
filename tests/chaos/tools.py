"""What the tool hosts of the chaos run serve besides the ledger's tools."""

from __future__ import annotations

import time

from orchestration import tool
from tests.fixtures.ledger import note


@tool("ledger/sign", approval="needs a signature", timeout_s=30)
def sign(key: str, sleep_s: float = 0.0) -> str:
    """Write an effect for which humans are asked until they say something."""
    time.sleep(sleep_s)
    note("effects", key)
    return f"signed {key}"
