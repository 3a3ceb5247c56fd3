"""The bytes of an answer before anybody knows its form: what it begins with, and what an early end means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from orchestration.core.errors import ModelError
from orchestration.core.model import ModelFault

_BOM = b"\xef\xbb\xbf"


def opened(pieces: Iterable[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first byte that is neither white space nor a byte order mark (empty if there is none), and all from it on."""
    rest = iter(pieces)
    begun = b""
    for piece in rest:
        begun = (begun + piece).lstrip()
        if begun and _BOM.startswith(begun[:3]):
            begun = begun.removeprefix(_BOM).lstrip()
            if _BOM.startswith(begun):
                continue  # nothing after the mark yet, or only a part of it
        if begun:
            break
    return begun[:1], _chain(begun, rest)


def _chain(begun: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield begun
    yield from rest


def until_settled(pieces: Iterator[bytes], settled: Callable[[], bool]) -> Iterator[bytes]:
    """`pieces`, where a connection that breaks or falls silent is an ordinary end once all that counts is there."""
    try:
        yield from pieces
    except ModelError as error:
        if not settled() or error.kind not in (ModelFault.TRUNCATED, ModelFault.UNAVAILABLE):
            raise
