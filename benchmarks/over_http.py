"""Whole turns over HTTP through real processes, against the bare model calls that they contain, measured in the same run.

Read the last column. A turn costs its model calls, and what is above them is Turnmill.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
from rich.console import Console
from rich.table import Table

from examples.demo import demo_stack

#: (what is measured, the user's text, model calls in it)
TURNS = (
    ("turn without tools (plan)", "say ok", 1),
    ("turn with one tool (plan, tool, observe, plan)", "add 1 and 2", 2),
    ("turn with three tools in one round", "calls 3", 2),
)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=100, help="turns of each kind")
    parser.add_argument("--clients", type=int, default=16, help="turns at once")
    options = parser.parse_args()
    console = Console()
    table = Table("measured", "per second", "ms each", "x its model calls", box=None)
    with demo_stack("whsec_" + "AAAA" * 8, console) as stack, httpx.Client(timeout=120) as client:
        model = f"{stack.env['OPENAI_BASE_URL']}/chat/completions"

        def ask_model(_: int) -> None:
            client.post(model, json={"model": "demo", "messages": [{"role": "user", "content": "say ok"}]}).raise_for_status()

        def turn(text: str) -> Callable[[int], None]:
            def one(_: int) -> None:
                response = client.post(f"{stack.url}/v1/agents/support/turns", json={"input": text}, headers={"Prefer": "wait=60"})
                if response.status_code != 200 or response.json()["state"] != "completed":
                    raise SystemExit(f"a turn did not complete: {response.status_code} {response.text[:300]}")

            return one

        for text in (text for _, text, _ in TURNS):
            turn(text)(0)  # the first of a kind connects and imports
        alone = _seconds(ask_model, options.turns, options.clients)
        table.add_row("model call alone", f"{options.turns / alone:.0f}", f"{alone / options.turns * 1000:.1f}", "1.0")
        for name, text, calls in TURNS:
            took = _seconds(turn(text), options.turns, options.clients)
            table.add_row(name, f"{options.turns / took:.0f}", f"{took / options.turns * 1000:.1f}", f"{took / (alone * calls):.1f}")
    console.print(table)


def _seconds(work: Callable[[int], None], times: int, at_once: int) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(work, range(times)))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
