"""Key expressions of the mesh, as far as declarations need them."""

from __future__ import annotations

import re


def matches(pattern: str, key: str) -> bool:
    """Whether the key expression `pattern` includes the plain key `key`: `*` is one chunk, `**` any number of chunks, `$*` any part of a
    chunk (which a `*` beside other characters is too, as people write it)."""
    return _match(pattern.split("/"), key.split("/"))


def is_expression(pattern: object) -> bool:
    """Whether `pattern` can match anything: text in chunks of which none is empty, without characters that no key has."""
    return isinstance(pattern, str) and all(pattern.split("/")) and not re.search(r"[?#;\s]|\$(?!\*)", pattern)


def precedence(pattern: str) -> tuple[int, int, int, int, int, str]:
    """Sorts the key expressions that match one key from the most specific to the widest; one that another includes comes before that.

    What counts first is how many chunks are spelled out, then how many in part; then `*` before `**`, and more chunks before fewer.
    """
    chunks = pattern.split("/")
    plain = sum("*" not in chunk for chunk in chunks)
    in_part = sum("*" in chunk and chunk not in ("*", "**") for chunk in chunks)
    return -plain, -in_part, chunks.count("**"), -len(chunks), -len(pattern), pattern


def _match(pattern: list[str], key: list[str]) -> bool:
    if not pattern:
        return not key
    if pattern[0] == "**":
        return any(_match(pattern[1:], key[skip:]) for skip in range(len(key) + 1))
    return bool(key) and _chunk_matches(pattern[0], key[0]) and _match(pattern[1:], key[1:])


def _chunk_matches(pattern: str, chunk: str) -> bool:
    if "*" not in pattern:
        return pattern == chunk
    return re.fullmatch(".*".join(map(re.escape, re.split(r"\$?\*", pattern))), chunk, re.DOTALL) is not None
