"""Server-sent events out of raw bytes, as they arrive: cut anywhere, with any line end, among comments and other fields.

It knows nothing of models; what the data of an event means is for `chat_reply.py` and `anthropic_reply.py` to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event with data. `lines` are its data lines; `whole` is False when the stream ended before the event did."""

    name: str
    lines: tuple[str, ...]
    whole: bool = True

    @property
    def data(self) -> str:
        """The data as the standard joins it."""
        return "\n".join(self.lines)


class EventReader:
    """Turns pieces of bytes into events. Feed it each piece in order, then `finish` once.

    Only CR, LF and CRLF end a line: the separators that text libraries also split at (U+2028, U+0085, …) are content here.
    Events without data (heartbeats, `retry:`, comments) are dropped.
    """

    def __init__(self) -> None:
        self._tail: list[bytes] = []
        self._after_cr = False
        self._at_start = True
        self._name = ""
        self._lines: list[str] = []

    def feed(self, piece: bytes) -> Iterator[ServerEvent]:
        """The events that `piece` completes."""
        if self._after_cr and piece:
            # The CR before has ended its line already; a LF now is the other half of the same line end.
            self._after_cr = False
            if piece.startswith(b"\n"):
                piece = piece[1:]
        # bytes.splitlines, unlike that of str, knows CR, LF and CRLF alone.
        for line in piece.splitlines(keepends=True):
            if not line.endswith((b"\r", b"\n")):
                self._tail.append(line)
                return
            self._after_cr = line.endswith(b"\r")
            event = self._take(self._with_tail(line.rstrip(b"\r\n")))
            if event is not None:
                yield event

    def finish(self) -> Iterator[ServerEvent]:
        """What is left when the stream has ended: at most one event, not `whole`, since no blank line closed it."""
        if self._tail:
            event = self._take(self._with_tail(b""))
            if event is not None:
                yield event
        if self._lines:
            yield ServerEvent(self._name, tuple(self._lines), whole=False)
            self._reset()

    def _with_tail(self, line: bytes) -> bytes:
        if self._tail:
            self._tail.append(line)
            line = b"".join(self._tail)
            self._tail.clear()
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        return line

    def _take(self, line: bytes) -> ServerEvent | None:
        if not line:
            event = ServerEvent(self._name, tuple(self._lines)) if any(self._lines) else None
            self._reset()
            return event
        field, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode("utf-8", "replace")
        if field == b"data":
            self._lines.append(text)
        elif field == b"event":
            self._name = text.strip()
        return None

    def _reset(self) -> None:
        self._name = ""
        self._lines = []
