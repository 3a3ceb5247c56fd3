"""JSON from outside, read strictly and at a bounded cost. What passes can be written again: UTF-8, no lone surrogates, no duplicate names,
finite numbers, bounded nesting, and not so many values that reading it would hold up everybody else.

What can be told from the text alone is told from it, in expressions that run through it once: a megabyte of brackets would cost a walk
through its values the better part of a second.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from orchestration.core.errors import BadRequest, Invalid

#: The deepest nesting of objects and lists that is taken.
MAX_DEPTH = 64

#: Digits of the longest whole number that is taken.
MAX_DIGITS = 100

#: Values of one body: elements, members, objects and lists.
MAX_VALUES = 100_000

# Possessive throughout, and without a closing quote it takes the rest: no text makes it look at anything twice.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_INNERMOST = re.compile(rb"[\[{][^\[\]{}]*+[\]}]")
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
_EXPONENT = re.compile(rb"[0-9][eE]")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def strict_json(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        BadRequest: it is no JSON, is not UTF-8, is nested too deeply, repeats a name, or has too many values or a number that is not
            finite or far too long.
        Invalid: a text in it has a lone surrogate, so it cannot be stored; says where.
    """
    frame = _STRING.sub(b'""', body)
    if frame.count(b",") + frame.count(b"[") + frame.count(b"{") > MAX_VALUES:
        raise BadRequest(f"the body has more than {MAX_VALUES} values")
    if _LONG_NUMBER.search(frame):
        raise BadRequest(f"the body has a number of more than {MAX_DIGITS} digits")
    try:
        value = json.loads(
            body.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite if _EXPONENT.search(frame) else None,
            object_pairs_hook=_unique,
        )
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise _too_deep() from None
    for _ in range(MAX_DEPTH):
        frame, taken = _INNERMOST.subn(b"", frame)
        if not taken:
            break
    else:
        if b"[" in frame or b"{" in frame:
            raise _too_deep()
    if _SURROGATE.search(body):
        _check_texts(value)
    return value


def _too_deep() -> BadRequest:
    return BadRequest(f"the body is nested deeper than {MAX_DEPTH} levels")


def _refuse_constant(name: str) -> Any:
    raise BadRequest(f"the body is not JSON: {name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise BadRequest("the body has a number that is too large")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) != len(pairs):
        # Whoever checks the request before us may take the first of the two, we the last.
        raise BadRequest("the body has an object with the same name twice")
    return named


def _check_texts(value: Any) -> None:
    waiting: list[tuple[Any, tuple[str | int, ...]]] = [(value, ())]
    while waiting:
        found, loc = waiting.pop()
        if isinstance(found, str):
            _check_text(found, loc)
        elif isinstance(found, (dict, list)):
            parts = found.items() if isinstance(found, dict) else enumerate(found)
            for key, part in parts:
                if isinstance(key, str):
                    _check_text(key, loc)
                if isinstance(part, (str, dict, list)):
                    waiting.append((part, (*loc, key)))


def _check_text(text: str, loc: tuple[str | int, ...]) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        found = {"loc": ["body", *loc], "msg": "a lone surrogate is no character"}
        raise Invalid("the body has a text with a lone surrogate", [found]) from None
