"""Tools for the mesh's tests, served by host processes; each effect is a line in the file that the environment names."""

from __future__ import annotations

import os
import time
from pathlib import Path

from orchestration.core.tool import tool


def _effect(line: str) -> None:
    with Path(os.environ["EFFECTS"]).open("a") as ledger:
        ledger.write(f"{line}\n")


@tool("shop/ship", idempotent=True, approval="it leaves the house")
def ship(order: str) -> dict[str, str]:
    """Ship an order."""
    _effect(order)
    return {"shipped": order}


@tool("shop/slow", idempotent=True, timeout_s=20)
def slow(order: str, hold: str) -> str:
    """Ship an order once the file `hold` is gone."""
    _effect(order)
    while Path(hold).exists():
        time.sleep(0.02)
    return f"shipped {order}"
