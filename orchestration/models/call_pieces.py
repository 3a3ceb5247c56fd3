"""Tool calls out of the pieces in which servers stream them: with or without index and id, interleaved, repeated, or whole.

What a call's arguments mean is not looked at; they leave as the text that the model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestration.core.errors import ModelError
from orchestration.core.model import ModelFault, RequestedCall
from orchestration.models.text_pieces import sound

#: Calls in one reply above which it counts as unreadable; a model in a loop writes them without end.
MAX_CALLS = 128


@dataclass(slots=True)
class _Open:
    id: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    chunk: int = 0

    def closed(self) -> bool:
        """Whether the arguments are a whole JSON value already."""
        last = next((piece for piece in reversed(self.arguments) if piece.strip()), "")
        if not last.rstrip().endswith("}"):
            return False
        try:
            json.loads("".join(self.arguments))
        except (ValueError, RecursionError):
            return False
        return True


class CallPieces:
    """The calls of one reply as they grow.

    Args:
        offered: names of the tools that the request offered; they settle whether a name came in pieces or was repeated.
    """

    def __init__(self, offered: Sequence[str] = ()) -> None:
        self._offered = frozenset(offered)
        self._calls: list[_Open] = []
        self._by_index: dict[int, _Open] = {}
        self._by_id: dict[str, _Open] = {}
        self._chunk = 0

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, pieces: Any) -> None:
        """Take the `tool_calls` of one chunk, or of a whole message. Anything but a list of objects is ignored.

        Raises:
            ModelError: more calls than `MAX_CALLS` (`protocol`).
        """
        self._chunk += 1
        for piece in pieces if isinstance(pieces, list) else [pieces]:
            if isinstance(piece, dict):
                self._add(piece)

    def _add(self, piece: dict[str, Any]) -> None:
        function = piece.get("function")
        if not isinstance(function, dict):
            function = piece  # some servers leave the wrapper out
        name = function.get("name")
        name = name if isinstance(name, str) else ""
        given = piece.get("id")
        given = given if isinstance(given, str) else ""
        arguments = function.get("arguments")
        index = _index(piece.get("index"))
        call = self._of(index, given, name, empty=arguments in (None, ""))
        if name and call.chunk != self._chunk and (whole := _whole(arguments)) is not None and call.closed():
            if json.loads("".join(call.arguments)) == whole:
                return  # the call once more, at the end of its pieces
            call = self._opened(given)
            if index is not None:
                self._by_index[index] = call
        call.chunk = self._chunk
        if given and not call.id:
            call.id = given
            self._by_id.setdefault(given, call)
        if name:
            call.names.append(name)
        if arguments is None:
            return
        if isinstance(arguments, str):
            call.arguments.append(arguments)
        else:
            call.arguments = [json.dumps(arguments, ensure_ascii=False)]

    def _of(self, index: int | None, given: str, name: str, *, empty: bool) -> _Open:
        """The call that a piece belongs to, or a new one."""
        if index is not None:
            known = self._by_index.get(index)
            if known is None:
                # An index that runs on while the id stays is one call still, unless it comes with a name.
                same = self._by_id.get(given) if given and not name else None
                known = same or self._opened(given)
            elif self._begins_another(known, given, name) and not (empty and not given and known.chunk != self._chunk):
                known = self._opened(given)  # all calls under one index: seen of several servers
            self._by_index[index] = known
            return known
        if given:
            same = self._by_id.get(given)
            # One message may hold two calls of the same made-up id; in a later chunk the id means the call that has it.
            return same if same is not None and not (name and same.chunk == self._chunk) else self._opened(given)
        if not self._calls or self._begins_another(self._calls[-1], given, name):
            return self._opened(given)
        return self._calls[-1]

    def _begins_another(self, known: _Open, given: str, name: str) -> bool:
        if not name:
            return False  # some servers make up a new id for every piece of one call
        if given and known.id:
            return given != known.id
        return known.chunk == self._chunk or known.closed()

    def _opened(self, given: str) -> _Open:
        if len(self._calls) >= MAX_CALLS:
            raise ModelError(ModelFault.PROTOCOL, f"the model asked for more than {MAX_CALLS} tools at once", retryable=True)
        call = _Open(id=given)
        self._calls.append(call)
        if given:
            self._by_id.setdefault(given, call)
        return call

    def finish(self) -> tuple[RequestedCall, ...]:
        """The calls in the order in which they were opened.

        Raises:
            ModelError: a call has arguments but no name (`protocol`).
        """
        done: list[RequestedCall] = []
        for call in self._calls:
            name = self._name(call.names)
            arguments = sound("".join(call.arguments))
            if not name:
                if arguments.strip():
                    raise ModelError(ModelFault.PROTOCOL, "the model asked for a tool without naming it", retryable=True)
                continue
            done.append(RequestedCall(name=name, arguments=arguments, id=sound(call.id)))
        return tuple(done)

    def _name(self, pieces: list[str]) -> str:
        joined = sound("".join(pieces)).strip()
        if len(pieces) < 2 or joined in self._offered:
            return joined
        last = pieces[-1].strip()
        if all(last.startswith(piece.strip()) for piece in pieces):
            return sound(last)  # repeated with each piece, or growing
        return joined


def _whole(arguments: Any) -> Any:
    """The value of arguments that are whole by themselves; None for a piece of some."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.rstrip().endswith("}"):
        return None
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _index(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str) and len(value) < 10 and value.strip().isdecimal():
        return int(value)
    return None
