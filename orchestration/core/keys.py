"""Key expressions of the mesh, as far as declarations need them."""

from __future__ import annotations

import fnmatch


def matches(pattern: str, key: str) -> bool:
    """Whether the key expression `pattern` (`*` one chunk, `**` any number of chunks) includes the plain key `key`."""
    return _match(pattern.split("/"), key.split("/"))


def _match(pattern: list[str], key: list[str]) -> bool:
    if not pattern:
        return not key
    if pattern[0] == "**":
        return any(_match(pattern[1:], key[skip:]) for skip in range(len(key) + 1))
    return bool(key) and fnmatch.fnmatchcase(key[0], pattern[0].replace("$*", "*")) and _match(pattern[1:], key[1:])
