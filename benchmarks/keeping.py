"""`python -m benchmarks.keeping`: what a finished turn leaves in Redis, by kind of turn and of key, and for how long.

One process, the real journal on a Redis server of its own. Read the bytes; they depend on no machine.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestration import Agent, ModelReply, RequestedCall, Usage, tool
from orchestration.testing.local import LocalTurnmill
from orchestration.testing.servers import redis_server

#: What the user, the model and the tool say: about as much as in a short exchange.
QUESTION = "My order o-42 arrived broken. Could you look up what was in it, and tell me what I can do now, please?"
ANSWER = "Order o-42 held one lamp for 40.00. You may send it back within 30 days; the refund takes three days. " * 2
FOUND = {"order_id": "o-42", "items": [{"sku": "lamp-7", "name": "Desk lamp", "amount": 40.0}], "status": "delivered", "note": "x" * 200}

#: Kinds of keys, by what stands in their names; the first that fits.
KINDS = {
    ":turn:": "turn (journal)",
    ":frames": "frames",
    ":log": "conversation's log",
    ":conv:": "conversation",
    ":ap:": "approval",
    ":audit": "audit stream",
    ":aps": "indexes of approvals",
}


@tool("orders/lookup")
def lookup(order_id: str) -> dict[str, Any]:
    """Look an order up: what is in it, and where it is."""
    return FOUND


@tool("orders/refund", approval="moves real money")
def refund(order_id: str, amount: float) -> dict[str, Any]:
    """Refund an order: the amount goes back to the customer who placed it."""
    return {"refunded": amount}


class Support:
    """A model that asks for the tool that the input names first, if it names one, and answers then."""

    model = "support"

    def complete(self, messages: Sequence[dict[str, Any]], *, tools: Any = None, sink: Any = None) -> ModelReply:
        last = messages[-1]
        asked = str(last["content"]).partition(":")[0] if last["role"] == "user" else ""
        arguments = {"lookup": {"order_id": "o-42"}, "refund": {"order_id": "o-42", "amount": 40.0}}.get(asked)
        if arguments is not None:
            return ModelReply("", (RequestedCall(f"orders-{asked}", json.dumps(arguments)),), usage=Usage(400, 30))
        return ModelReply(ANSWER, usage=Usage(600, 60))


def plain(here: LocalTurnmill, number: int) -> None:
    here.ask("support", QUESTION)


def with_tool(here: LocalTurnmill, number: int) -> None:
    here.ask("support", f"lookup: {QUESTION}")


def approved(here: LocalTurnmill, number: int) -> None:
    turn = here.ask("support", f"refund: {QUESTION}")
    here.decide(turn["calls"][0]["approval_id"], True)
    here.run()


def one_of_twenty(here: LocalTurnmill, number: int) -> None:
    here.ask("support", f"lookup: {QUESTION}", conversation_id=f"c{number // 20}")


SHAPES: dict[str, Callable[[LocalTurnmill, int], None]] = {
    "an answer": plain,
    "one tool call": with_tool,
    "one call that a human approved": approved,
    "one tool call, 20 turns in a conversation": one_of_twenty,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=500, help="finished turns of each kind")
    options = parser.parse_args()
    console = Console()
    total = Table("turn with", "bytes in all", "journal", "conversation, log", "frames", "approval, audit", "turns in 1 GiB", box=None)
    with redis_server(appendonly="off") as server:
        for name, shape in SHAPES.items():
            here = LocalTurnmill(Agent("support", Support(), tools=[lookup, refund]), lookup, refund, redis_url=server.url)
            here.queue.sent.clear()
            for number in range(20):  # the first ones also pay for scripts and indexes
                shape(here, number)
            client: Any = here.ports.store.client
            client.flushdb()
            here.ports.lease.register(instead_of=here.ports.lease.process)
            before = int(client.info("memory")["used_memory"])
            for number in range(options.turns):
                shape(here, number)
            each = (int(client.info("memory")["used_memory"]) - before) / options.turns
            parts = _parts(client, options.turns)
            total.add_row(
                name,
                f"{each:,.0f}",
                f"{parts['turn (journal)']:,.0f}",
                f"{parts['conversation'] + parts[KINDS[':log']]:,.0f}",
                f"{parts['frames']:,.0f}",
                f"{parts['approval'] + parts['audit stream'] + parts[KINDS[':aps']]:,.0f}",
                f"{2**30 / each:,.0f}",
            )
            _check(client)
            here.ports.store.close()
    console.print(total)


def _parts(client: Any, turns: int) -> Counter[str]:
    """Bytes a turn by kind of key."""
    sizes: Counter[str] = Counter()
    for key in client.scan_iter(count=1000):
        kind = next((kind for part, kind in KINDS.items() if part in key), "other")
        sizes[kind] += client.memory_usage(key, samples=0)
    return Counter({kind: size / turns for kind, size in sizes.items()})  # type: ignore[misc]


def _check(client: Any) -> None:
    """Nothing that grows with the number of turns stays for ever, but for the audit stream and its indexes."""
    endless = [key for key in client.scan_iter(count=1000) if client.ttl(key) == -1]
    if len(endless) > 20:
        raise SystemExit(f"{len(endless)} keys without an end, {endless[0]} among them")


if __name__ == "__main__":
    main()
