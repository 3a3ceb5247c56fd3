"""JSON that every peer can read: no NaN, no lone surrogates, no nesting without end. Leaves the meaning of values to others."""

from __future__ import annotations

import json
import math
from typing import Any

#: Nesting beyond this is refused; writers down the line recurse too.
MAX_DEPTH = 200

#: Python refuses to turn longer digit strings into numbers; such a number stays text.
MAX_INT_DIGITS = 4000


def loads(data: bytes | str) -> Any:
    """The value of a JSON text. NaN, infinities and numbers too large for a float become null, lone surrogates U+FFFD.

    Raises:
        ValueError: it is no JSON, no UTF-8, or nested deeper than 200.
    """
    text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
    try:
        value = json.loads(text, parse_constant=lambda _: None, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    # Only an escape can smuggle in half a surrogate pair, and only many brackets can nest too deep: most replies skip the walk.
    if "\\u" in text or text.count("[") + text.count("{") > MAX_DEPTH or not isinstance(data, bytes):
        return strict(value)
    return value


def dumps(value: Any) -> str:
    """Compact strict JSON of a value made of JSON types; what JSON cannot say becomes null, what is no JSON type becomes text."""
    return json.dumps(strict(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def strict(value: Any, depth: int = 0) -> Any:
    """`value` with null for NaN and infinities, U+FFFD for lone surrogates, text for keys and foreign types.

    Raises:
        ValueError: nested deeper than 200.
    """
    if isinstance(value, str):
        return clean_text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # bit_length is cheap where counting digits is not
        return value if value.bit_length() < MAX_INT_DIGITS * 3 else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict):
        return {clean_text(key if isinstance(key, str) else str(key)): strict(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item, depth + 1) for item in value]
    return clean_text(str(value))


def clean_text(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _float(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _int(text: str) -> int | str:
    return int(text) if len(text) <= MAX_INT_DIGITS else text
