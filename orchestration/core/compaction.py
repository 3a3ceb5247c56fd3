"""Shorter views of a long conversation. The log keeps everything; what is sent is a view of its older part and the rest whole.

A compactor turns the messages of the older part into fewer or shorter ones. When one is due, and what an overflow of the
model's context makes of it, is decided here; running it and keeping the view is for the plan step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from orchestration.core.conversation import Entry, messages
from orchestration.core.errors import CompactionError
from orchestration.core.model import Message
from orchestration.core.safe_json import clean, dumps

#: Characters of a tool result in the recent part, once the model's context has overflowed.
OVERFLOW_RESULT_CHARS = 2_000

#: What is left of the size, at most, for an overflow to count as mended.
OVERFLOW_SHARE = 0.6

_STUB = re.compile(r"\[elided: \d+ chars of .* result\]", re.DOTALL)
_ROLES = ("system", "developer", "user", "assistant", "tool")


@runtime_checkable
class Compactor(Protocol):
    """Rewrites the older part of a conversation; `compact` may be sync or async.

    `messages` are those that the model was sent (without the system prompt), with tool results as short as it saw them; an
    earlier compaction's output is among them. What is returned replaces them. A call and its result stay or go together.
    """

    def compact(self, messages: Sequence[Message]) -> Any: ...


#: What an agent takes as its compactor: an object with `compact`, or that function alone.
AnyCompactor = Compactor | Callable[[Sequence[Message]], list[Message] | Awaitable[list[Message]]]


class ElideToolResults:
    """Replaces older tool results by a stub that names the tool and the size it had. Asks no model; the same output for the same input.

    Args:
        keep: tools, as the model calls them, whose results stay whole.
    """

    def __init__(self, keep: Collection[str] = ()) -> None:
        self.keep = frozenset([keep] if isinstance(keep, str) else keep)

    def compact(self, messages: Sequence[Message]) -> list[Message]:
        """`messages` with the results of all other tools elided, unless a result is shorter than its stub or is one already."""
        return [self._elided(message) if message.get("role") == "tool" else message for message in messages]

    def _elided(self, message: Message) -> Message:
        name, content = message.get("name") or "tool", message.get("content")
        if name in self.keep or not isinstance(content, str):
            return message
        stub = f"[elided: {len(content)} chars of {name} result]"
        return message if len(content) <= len(stub) or _STUB.fullmatch(content) else {**message, "content": stub}

    def __repr__(self) -> str:
        return f"ElideToolResults(keep={sorted(self.keep)})"


@dataclass(frozen=True, slots=True)
class View:
    """What is sent in place of the first `upto` entries of the log. `max_result_chars` bounds the results of the rest, too."""

    upto: int = 0
    messages: list[Message] = field(default_factory=list)
    max_result_chars: int | None = None

    def as_json(self) -> str:
        """JSON text; `from_json` takes it back."""
        return dumps(clean({"upto": self.upto, "messages": self.messages, "max_result_chars": self.max_result_chars}))

    @classmethod
    def from_json(cls, text: str) -> View:
        """The view of a text; the empty view for an empty one."""
        return cls(**json.loads(text)) if text else cls()

    def over(self, entries: Sequence[Entry], *, max_result_chars: int | None) -> list[Message]:
        """The messages to be sent of a log with these entries, without a system prompt."""
        return [*self.messages, *self.rest(entries, max_result_chars=max_result_chars)]

    def rest(self, entries: Sequence[Entry], upto: int | None = None, *, max_result_chars: int | None) -> list[Message]:
        """The messages of the entries behind the view, or of those before entry `upto`."""
        return messages(entries[self.upto : upto], max_result_chars=self.result_chars(max_result_chars))

    def result_chars(self, most: int | None) -> int | None:
        """The bound of a tool result where an agent's own is `most`."""
        bounds = [bound for bound in (most, self.max_result_chars) if bound is not None]
        return min(bounds) if bounds else None


def older_part(entries: Sequence[Entry], keep_rounds: int) -> int:
    """How many entries lie before the last `keep_rounds` rounds. A round is a reply with its results; what users said right before
    the first kept one is kept with it."""
    replies = [at for at, entry in enumerate(entries) if entry["dir"] == "out" and entry["data"]["kind"] in ("tool_calls", "message")]
    if len(replies) < keep_rounds:
        return 0
    at = replies[-keep_rounds] if keep_rounds > 0 else len(entries)
    while at > 0 and entries[at - 1]["dir"] == "in":
        at -= 1
    return at


def due(entries: Sequence[Entry], view: View, *, compact_after: int | None, keep_rounds: int, last_input_tokens: int) -> int:
    """Up to which entry the log is to be compacted now; 0 for not now. That is so when the last model call was over
    `compact_after` and rounds have aged out of the recent ones since the last time."""
    if compact_after is None or last_input_tokens <= compact_after:
        return 0
    upto = older_part(entries, keep_rounds)
    return upto if upto > view.upto else 0


def overflow_part(entries: Sequence[Entry], view: View, keep_rounds: int) -> int:
    """Up to which entry the log is to be compacted because the model's context overflowed: all but the last round, or all."""
    for keep in (min(keep_rounds, 1), 0):
        upto = older_part(entries, keep)
        if upto > view.upto:
            return upto
    return view.upto


def after_overflow(entries: Sequence[Entry], view: View, *, size_before: int, max_result_chars: int | None) -> View:
    """`view`, made shorter still where the compactor alone did not mend the overflow: recent results are cut, then the oldest
    messages are left out, whole calls at a time."""
    if size_of(view.over(entries, max_result_chars=max_result_chars)) <= OVERFLOW_SHARE * size_before:
        return view
    view = View(view.upto, view.messages, OVERFLOW_RESULT_CHARS)
    rest = size_of(view.rest(entries, max_result_chars=max_result_chars))
    if rest + size_of(view.messages) <= OVERFLOW_SHARE * size_before:
        return view
    groups = grouped(view.messages)
    while groups and rest + sum(map(size_of, groups)) > OVERFLOW_SHARE * size_before:
        groups.pop(0)
    return View(view.upto, [message for group in groups for message in group], view.max_result_chars)


def trimmed(shown: Sequence[Message], most: int | None) -> list[Message]:
    """The newest of `shown`, about `most` messages, beginning with a user's. The last thing that a user said is always there, and a
    call is never parted from its result, even where that takes more."""
    if most is None or len(shown) <= most:
        return list(shown)
    groups = grouped(shown)
    asked = max((at for at, group in enumerate(groups) if group[0].get("role") == "user"), default=-1)
    first = max(asked, 0)
    while first > 0 and groups[first - 1][0].get("role") == "user":
        first -= 1  # inputs that came one after the other belong together
    said, since = groups[first : asked + 1], groups[asked + 1 :]
    before: list[list[Message]] = []
    room = most - _count(said)
    if _count(since) > room:
        since = _newest(since, room) or since[-1:]
    else:
        before = _newest(groups[:first], room - _count(since))
        while before and before[0][0].get("role") != "user":
            before.pop(0)
    return [message for group in (*before, *said, *since) for message in group]


def _newest(groups: list[list[Message]], room: int) -> list[list[Message]]:
    first = len(groups)
    while first > 0 and len(groups[first - 1]) <= room:
        first -= 1
        room -= len(groups[first])
    return groups[first:]


def _count(groups: list[list[Message]]) -> int:
    return sum(map(len, groups))


def grouped(shown: Sequence[Message]) -> list[list[Message]]:
    """Messages in groups that stay or go together: an assistant's calls with their results, every other message alone."""
    groups: list[list[Message]] = []
    for message in shown:
        if message.get("role") == "tool" and groups:
            groups[-1].append(message)
        else:
            groups.append([message])
    return groups


def size_of(shown: Sequence[Message]) -> int:
    """Characters of messages, as a measure of their tokens."""
    return len(dumps(clean(list(shown))))


def checked(compacted: Any) -> list[Message]:
    """What a compactor returned, as messages that a provider takes.

    Raises:
        CompactionError: it is no list of messages, or a call and its result are no longer together.
    """
    if not isinstance(compacted, (list, tuple)):
        raise CompactionError(f"the compactor returned {type(compacted).__name__}, not a list of messages; nothing was sent")
    open_calls: list[str] = []
    for place, message in enumerate(compacted):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise CompactionError(f"message {place} of the compactor's is none; nothing was sent")
        if message["role"] == "tool":
            if message.get("tool_call_id") not in open_calls:
                raise CompactionError(f"message {place} of the compactor's is a tool result without its call; nothing was sent")
            open_calls.remove(str(message["tool_call_id"]))
            continue
        if open_calls:
            raise CompactionError(f"before message {place} of the compactor's, {len(open_calls)} call(s) have no result; nothing was sent")
        if message["role"] == "assistant":
            open_calls = [str(call.get("id")) for call in message.get("tool_calls") or () if isinstance(call, dict)]
    if open_calls:
        raise CompactionError(f"at the end of the compactor's messages {len(open_calls)} call(s) have no result; nothing was sent")
    found: list[Message] = clean(list(compacted))
    return found
