"""What is asked of Turnmill during a chaos run: conversations with turns of mixed shape, made from a seed. Plain values only.

What is asked is the same for the same seed; what happens to it depends on the machine as well.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Every tool call of the run has one effect of its own, named by this argument.
KEY = "key"

#: The pseudo-tools that ask another agent, and hand over to one; the gated tool whose requests are held, not refused.
AGENT, TRANSFER, HELD = "agent", "transfer", "sign"

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Submission:
    """One input to submit. Times are in seconds.

    Args:
        script: what the model does with it (see `tests/fixtures/ledger_agents.py`).
        pause_s: counted from when the one before was accepted.
        after_end: wait for the turn before to end first.
        keyed: sent with an Idempotency-Key and again until it is answered; without one it is sent once, and may or may not arrive.
        cancel_after_s, cancel_call_after_s: when somebody cancels the turn, or one of its calls, counted from its acceptance.
        watched: somebody follows the turn's frames.
        called_back: a `callback_url` is told of its end and of its approvals.
    """

    name: str
    script: dict[str, Any]
    on_busy: str = "queue"
    pause_s: float = 0.0
    after_end: bool = False
    keyed: bool = True
    deadline_s: float | None = None
    cancel_after_s: float | None = None
    cancel_call_after_s: float | None = None
    wait_s: int = 0
    watched: bool = False
    called_back: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation with `agent`: its submissions are sent in order, from `begins_s` on. Who watches it does so over
    server-sent events, or `over_socket`."""

    conversation_id: str
    agent: str
    begins_s: float
    submissions: tuple[Submission, ...]
    watched: bool
    over_socket: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """What the humans do about one approval: after `after_s` they say `approved` (None: nobody decides), perhaps with other
    arguments, perhaps two of them at once and of two minds. With `late` they let its time run out first, and reopen it."""

    after_s: float
    approved: bool | None
    edited: bool = False
    contested: bool = False
    late: bool = False


def conversations(seed: int, *, turns: int, over_s: float) -> list[Conversation]:
    """Conversations with `turns` submissions in all, begun within `over_s` seconds."""
    chance = random.Random(f"{seed}/turns")
    made: list[Conversation] = []
    left = turns
    while left > 0:
        size = min(left, chance.choice((1, 1, 2, 3, 4, 6)))
        name = f"c{len(made)}"
        submissions = tuple(_submission(chance, f"{name}-{place}", first=place == 0) for place in range(size))
        made.append(
            Conversation(
                f"chaos-{name}",
                chance.choice(("ledger", "front")),
                chance.uniform(0, over_s),
                submissions,
                watched=chance.random() < 0.4,
                over_socket=chance.random() < 0.5,
            )
        )
        left -= size
    return made


def scripts(script: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A script and those that it hands to other agents."""
    yield script
    for calls in script["rounds"]:
        for tool, arguments in calls:
            if tool == AGENT:
                yield from scripts(json.loads(arguments["input"]))


def choice(seed: int, key: str, *, held: bool) -> Choice:
    """What the humans do about the gated call whose effect is `key`; one whose request is `held` is decided some time."""
    chance = random.Random(f"{seed}/{key}")
    decided = chance.choices((True, False, None), (0.7, 0.2, 0.0 if held else 0.1))[0]
    return Choice(
        after_s=chance.choice((0.0, 0.0, chance.uniform(0, 3))),
        approved=decided,
        edited=decided is True and chance.random() < 0.25,
        contested=decided is not None and chance.random() < 0.15,
        late=held and chance.random() < 0.6,
    )


def _submission(chance: random.Random, name: str, *, first: bool) -> Submission:
    on_busy = "queue" if first else chance.choices(("queue", "interrupt", "steer", "reject"), (0.7, 0.1, 0.15, 0.05))[0]
    script: dict[str, Any] = {"name": name, "rounds": _rounds(chance, name)}
    if chance.random() < 0.3:
        script |= {"tokens": chance.randint(2, 30), "token_s": round(chance.uniform(0.02, 0.15), 3)}
    elif chance.random() < 0.3:
        script["sleep_s"] = round(chance.choice((0.1, 0.5, chance.uniform(0.5, 4))), 3)
    if chance.random() < 0.08:
        script["faults"] = 1
    if chance.random() < 0.04:
        script["padding"] = "ü" * chance.choice((1_000, 30_000))
    return Submission(
        name=name,
        script=script,
        on_busy=on_busy,
        pause_s=0.0 if first else chance.choice((0.0, 0.1, chance.uniform(0, 4))),
        after_end=not first and on_busy == "queue" and chance.random() < 0.3,
        keyed=chance.random() < 0.92,
        deadline_s=round(chance.uniform(1, 8), 2) if chance.random() < 0.05 else None,
        cancel_after_s=chance.uniform(0, 4) if chance.random() < 0.07 else None,
        cancel_call_after_s=chance.uniform(0.2, 3) if chance.random() < 0.07 else None,
        wait_s=chance.randint(1, 6) if chance.random() < 0.08 else 0,
        watched=chance.random() < 0.4,
        called_back=chance.random() < 0.25,
    )


def _rounds(chance: random.Random, name: str, *, nested: bool = False) -> list[list[Call]]:
    """No tools in a third of the turns, else one to three rounds of one to four calls: gated ones among them, some that other agents
    answer, and handoffs."""
    count = chance.choices((0, 1, 2, 3), (0.1, 0.7, 0.2, 0.0) if nested else (0.33, 0.42, 0.15, 0.1))[0]
    rounds: list[list[Call]] = []
    for round_ in range(count):
        size = chance.choices((1, 2, 3, 4), (0.5, 0.2, 0.2, 0.1))[0]
        gated = chance.random() < 0.3
        calls = [_call(chance, f"{name}.{round_}.{index}", gated=gated and index == 0, nested=nested) for index in range(size)]
        if not nested and chance.random() < 0.12:
            calls.insert(chance.randint(0, size), (TRANSFER, {}))
        rounds.append(calls)
    return rounds


def _call(chance: random.Random, key: str, *, gated: bool, nested: bool) -> Call:
    if not nested and not gated and chance.random() < 0.12:
        inner: dict[str, Any] = {"name": key, "rounds": _rounds(chance, key, nested=True)}
        if chance.random() < 0.3:
            inner |= {"tokens": chance.randint(2, 10), "token_s": 0.05}
        return AGENT, {"input": json.dumps(inner)}
    arguments: dict[str, Any] = {KEY: key}
    if chance.random() < 0.6:
        arguments["sleep_s"] = round(chance.choice((0.05, 0.2, chance.uniform(0, 2))), 3)
    if gated:
        return chance.choices(("pay", HELD), (0.65, 0.35))[0], arguments
    weights = {"write": 0.4, "note": 0.25, "own": 0.1, "keep": 0.1, "refuse": 0.07, "pay": 0.05, HELD: 0.03}
    return chance.choices(list(weights), list(weights.values()))[0], arguments
