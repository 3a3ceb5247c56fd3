"""Values as strict JSON for a model's server, whatever a conversation holds: no NaN, no half characters, text once encoded."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from orchestration.core.errors import ModelError
from orchestration.core.model import ModelFault
from orchestration.models.text_pieces import sound


def body_of(who: str, payload: dict[str, Any]) -> bytes:
    """`payload` as the bytes of a request. NaN and infinities become null, lone surrogates U+FFFD.

    Raises:
        ModelError: something in it is no JSON value (`bad_request`).
    """
    try:
        return sound(_text(payload)).encode()
    except (TypeError, RecursionError):
        raise ModelError(ModelFault.BAD_REQUEST, f"{who}: a message or tool is no JSON value", retryable=False) from None


def as_text(value: Any) -> str:
    """`value` as the text of a message: text stays, nothing is empty, content parts of text are joined, all else is its JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, list) and value and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "\n".join(part["text"] for part in value)
    try:
        return _text(value)
    except (TypeError, RecursionError):
        return str(type(value).__name__)


def object_of(arguments: Any) -> dict[str, Any]:
    """The arguments of a call in the history as an object. What is none is kept under `malformed`, so that the model sees what it wrote."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return {"malformed": arguments}
    return value if isinstance(value, dict) else {"malformed": arguments}


def arguments_text(arguments: Any) -> str:
    """The arguments of a call in the history as the JSON text of an object, once encoded; text that is one already stays as it is."""
    value = object_of(arguments)
    if isinstance(arguments, str) and value and "malformed" not in value and "NaN" not in arguments and "Infinity" not in arguments:
        return arguments
    return _text(value)


def wire_name(name: Any) -> str:
    """A tool's name in the history as providers take one (`^[A-Za-z0-9_-]{1,64}$`): a model may have made up another."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", as_text(name))[:64] or "unnamed"


def _text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value
