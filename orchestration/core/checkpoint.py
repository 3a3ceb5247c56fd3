"""A conversation as plain data, as an agent's `on_round` is given it: to keep a copy elsewhere, or to watch a turn grow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypedDict

from orchestration.core.compaction import View
from orchestration.core.conversation import Entry, messages
from orchestration.core.limits import Spent
from orchestration.core.model import Message
from orchestration.core.safe_json import clean

#: The form of a checkpoint; it grows when a field changes its meaning.
VERSION = 1


class Checkpoint(TypedDict):
    """A conversation when a round has ended. JSON can carry all of it.

    `messages` are whole: no result is cut, nothing is compacted, and every call has its result. The agent's instructions are the
    first of them where there are any, and `system` on their own. `compacted` is what a model is sent in place of the oldest ones,
    or None. `total_usage` (`input`, `output`, `total`) counts all turns of the conversation. `stop_reason` is None until the turn
    has ended.
    """

    version: int
    conversation_id: str
    turn_id: str
    agent: str
    round: int
    stop_reason: str | None
    system: str
    messages: list[Message]
    compacted: list[Message] | None
    total_usage: dict[str, int]


#: `on_round(checkpoint)`, sync or async.
OnRound = Callable[[Checkpoint], Awaitable[None] | None]


def checkpoint(
    entries: Sequence[Entry],
    *,
    conversation_id: str,
    turn_id: str,
    agent: str,
    system: str,
    round_: int,
    view: View,
    spent: Spent,
    stop_reason: str | None = None,
) -> Checkpoint:
    """What there is of a conversation with these `entries`; a copy, so whoever gets it may change it."""
    kept: list[Message] = clean(messages(entries, system=system))
    return {
        "version": VERSION,
        "conversation_id": conversation_id,
        "turn_id": turn_id,
        "agent": agent,
        "round": round_,
        "stop_reason": stop_reason,
        "system": system,
        "messages": kept,
        "compacted": clean(view.messages) if view.upto else None,
        "total_usage": {
            "input": spent.input_tokens,
            "output": spent.output_tokens,
            "total": spent.input_tokens + spent.output_tokens,
        },
    }
