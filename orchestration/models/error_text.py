"""What of a server's error text may be repeated: one short line, no page, no key, and nothing that was in the request.

Servers like to quote what they were sent, so each stretch that also stands in the request is cut out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

#: Characters of a server's own words in an error message.
MAX_CHARS = 240

#: Characters in a row that count as quoted from the request; shorter ones are ordinary words.
_ECHO_CHARS = 16

_HOLE = "…"
_PAGE = re.compile(r"^\s*<|<!doctype|<html|<body|</\w+>", re.IGNORECASE)
_SECRET = re.compile(r"\bbearer\s+\S+|\b(?:sk|pk|rk|gsk|key|xai|hf|r8)[-_][\w*.…-]{3,}|\bAIza[\w-]{8,}|[\w+/=-]{32,}", re.IGNORECASE)
_QUOTED = re.compile(r"'([^']{3,})'|\"([^\"]{3,})\"|`([^`]{3,})`")


class Shown:
    """Decides what may be shown of a server's words about one request.

    Args:
        request: the request's messages and tools as they were sent.
        key: the key it was sent with.
    """

    def __init__(self, request: Any = None, key: str = "") -> None:
        self._request = request
        self._key = key

    def of(self, words: str) -> str:
        """`words` in one line of at most `MAX_CHARS` characters; empty for a page."""
        if _PAGE.search(words[:4000]):
            return ""
        text = "".join(char if char.isprintable() else " " for char in " ".join(words[:2000].split()))
        if self._key:
            text = text.replace(self._key, _HOLE)
        text = _SECRET.sub(_HOLE, text)
        # The pieces are kept apart by a character that no line of `text` can hold.
        text = _without_echo(text, "\n".join(" ".join(part.split()) for part in _strings(self._request)))
        return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + _HOLE


def _without_echo(text: str, sent: str) -> str:
    if not sent:
        return text
    cut = [False] * len(text)
    for start in range(len(text) - _ECHO_CHARS + 1):
        if text[start : start + _ECHO_CHARS] in sent:
            cut[start : start + _ECHO_CHARS] = [True] * _ECHO_CHARS
    for match in _QUOTED.finditer(text):
        if next(part for part in match.groups() if part) in sent:
            start, end = match.start() + 1, match.end() - 1
            cut[start:end] = [True] * (end - start)
    kept = [_HOLE if gone else char for char, gone in zip(text, cut, strict=True)]
    return re.sub(f"{_HOLE}+", _HOLE, "".join(kept))


def _strings(value: Any) -> Iterator[str]:
    """The texts of a request's values; names of fields are the wire's own words and stay."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _all(value.values())
    elif isinstance(value, (list, tuple)):
        yield from _all(value)


def _all(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        yield from _strings(value)
