"""What a host sends back: results made JSON, failures made errors of the wire, and the text form in which a record keeps either. Pure."""

from __future__ import annotations

import base64
import importlib
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from orchestration.core.json_schema import is_struct
from orchestration.core.tool_error import ToolError
from orchestration.mesh import strict_json, wire

#: A result that is neither JSON nor can be made so is described in at most so many characters.
_MAX_DESCRIPTION_CHARS = 10_000

_BINARY = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply: its bytes and their encoding. `ran` is False when it says that nothing ran."""

    payload: bytes
    encoding: str = "application/json"
    ran: bool = True

    def kept(self) -> str:
        """The text that a record keeps."""
        if self.encoding == _BINARY:
            return "b" + base64.b64encode(self.payload).decode()
        return "j" + self.payload.decode()

    @classmethod
    def from_kept(cls, text: str) -> Answer:
        """The answer of a record; raises ValueError for what `kept` never wrote."""
        if text.startswith("b"):
            return cls(base64.b64decode(text[1:], validate=True), _BINARY)
        if text.startswith("j"):
            return cls(text[1:].encode())
        raise ValueError("a record of an unknown form")


def of_result(value: Any) -> Answer:
    """A function's result as a reply. Bytes go as they are; what has no JSON form goes as its text."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Answer(bytes(value), _BINARY)
    return Answer(wire.encode_result(_jsonable(value)))


def of_error(code: str, message: str, *, correlation_id: str, details: Any = None) -> Answer:
    """A refusal or failure as a reply."""
    return Answer(wire.encode_error(code, message, correlation_id=correlation_id, details=details), ran=code not in wire.NOT_RUN_CODES)


def of_exception(error: BaseException, *, correlation_id: str) -> Answer:
    """What a caller may read of an exception: a ToolError's own words, nothing of any other."""
    if isinstance(error, ToolError):
        return of_error(error.code, error.message, correlation_id=correlation_id)
    return of_error("internal_error", "Internal error", correlation_id=correlation_id)


def of_invalid(error: ValidationError, *, correlation_id: str) -> Answer:
    """Which arguments do not fit, and why; never what they were."""
    details = [
        {"type": one["type"], "loc": list(one["loc"]), "msg": one["msg"]}
        for one in error.errors(include_url=False, include_context=False, include_input=False)
    ][:100]
    places = "; ".join(f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in details[:10])
    return of_error("validation_error", f"arguments do not fit: {places}", correlation_id=correlation_id, details=details)


def where(error: BaseException) -> str:
    """The class of an exception and the line that raised it, for the log. Its message may hold what the caller sent."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    return f"{type(error).__name__}{place}"


def _jsonable(value: Any) -> Any:
    for bytes_mode in ("utf8", "base64"):
        try:
            return strict_json.strict(to_jsonable_python(value, fallback=_described, inf_nan_mode="constants", bytes_mode=bytes_mode))
        except (PydanticSerializationError, ValueError, UnicodeError, RecursionError):
            continue
    return _described(value)


def _described(value: Any) -> Any:
    if is_struct(type(value)):
        return importlib.import_module("msgspec").to_builtins(value, str_keys=True)
    try:
        text = str(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text[:_MAX_DESCRIPTION_CHARS]
