"""Text that comes in pieces: halves of a character put together, and thinking that a server sends inside the answer told apart.

Both work on a stream, so they hold back as little as they can and give the rest when the stream ends.
"""

from __future__ import annotations

from orchestration.core.model import Delta, Sink

_OPEN = "<think>"
_CLOSE = "</think>"


def sound(text: str) -> str:
    """`text` without lone surrogates: halves that belong together become one character, others U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class SoundText:
    """Pieces of text in which a server may have cut an escaped pair of surrogates in two."""

    def __init__(self) -> None:
        self._half = ""

    def feed(self, piece: str) -> str:
        """What can be shown now; a first half at the end waits for its second."""
        piece = self._half + piece
        self._half = ""
        if piece and "\ud800" <= piece[-1] <= "\udbff":
            self._half = piece[-1]
            piece = piece[:-1]
        return sound(piece)

    def finish(self) -> str:
        """What is left: nothing, or U+FFFD for a half that stayed alone."""
        left, self._half = self._half, ""
        return sound(left)


class ThinkTags:
    """Splits an answer that opens with `<think>…</think>` into thinking and text; a tag further on is ordinary text."""

    def __init__(self, *, split: bool = True) -> None:
        self._state = "start" if split else "text"
        self._held = ""

    def feed(self, piece: str) -> tuple[str, str]:
        """(text, thinking) that `piece` settles."""
        if self._state == "text" or not piece:
            return piece, ""
        held = self._held + piece
        self._held = ""
        thinking = ""
        if self._state == "start":
            begun = held.lstrip()
            if not begun.startswith(_OPEN):
                if _OPEN.startswith(begun):
                    self._held = held
                    return "", ""
                self._state = "text"
                return held, ""
            self._state = "thinking"
            held = begun[len(_OPEN) :]
        if self._state == "thinking":
            thinking, closed, held = held.partition(_CLOSE)
            if not closed:
                kept = _overlap(thinking, _CLOSE)
                self._held = thinking[len(thinking) - kept :]
                return "", thinking[: len(thinking) - kept]
            self._state = "after"
        # The blank lines between the closing tag and the answer belong to neither.
        held = held.lstrip()
        if held:
            self._state = "text"
        return held, thinking

    def finish(self) -> tuple[str, str]:
        """(text, thinking) that was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return ("", held) if self._state == "thinking" else (held, "")


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)


class Collector:
    """Gathers an answer's text and thinking, and shows each piece to the sink as soon as it is settled.

    Args:
        sink: receives the pieces; what it raises passes through.
        think_tags: whether an answer that opens with `<think>` has its thinking there.
    """

    def __init__(self, sink: Sink | None, *, think_tags: bool = False) -> None:
        self._sink = sink
        self._tags = ThinkTags(split=think_tags)
        self._sound_text = SoundText()
        self._sound_thinking = SoundText()
        self._text: list[str] = []
        self._thinking: list[str] = []

    def add(self, text: str = "", thinking: str = "") -> None:
        """Take a piece as the server sent it."""
        said, thought = self._tags.feed(self._sound_text.feed(text)) if text else ("", "")
        self._show(said, (self._sound_thinking.feed(thinking) if thinking else "") + thought)

    def finish(self) -> None:
        """Show what was held back; nothing follows."""
        said, thought = self._tags.feed(self._sound_text.finish())
        left_said, left_thought = self._tags.finish()
        self._show(said + left_said, self._sound_thinking.finish() + thought + left_thought)

    def _show(self, text: str, thinking: str) -> None:
        if text:
            self._text.append(text)
        if thinking:
            self._thinking.append(thinking)
        if self._sink is not None and (text or thinking):
            self._sink(Delta(text=text, thinking=thinking))

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._text)

    @property
    def thinking(self) -> str:
        """All thinking so far."""
        return "".join(self._thinking)

    @property
    def empty(self) -> bool:
        """Whether nothing visible has come."""
        return not self._text and not self._thinking
