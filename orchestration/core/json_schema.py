"""JSON schemas as providers want them, and which of the two libraries that make them a class belongs to."""

from __future__ import annotations

import sys
from typing import Any

from orchestration.core.safe_json import clean, dumps


def is_struct(cls: Any) -> bool:
    """Whether `cls` is a `msgspec.Struct`; whoever has one has imported that library."""
    msgspec = sys.modules.get("msgspec")
    return msgspec is not None and isinstance(cls, type) and issubclass(cls, msgspec.Struct)


def inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` with an object at its top, as providers want parameters: a reference there is resolved, the class's name dropped."""
    schema = dict(schema)
    reference = schema.pop("$ref", None)
    if isinstance(reference, str):
        name = reference.rpartition("/")[2]
        schema = {**schema.get("$defs", {}).get(name, {}), **schema}
        definitions = {key: value for key, value in schema.get("$defs", {}).items() if key != name}
        if f'"{reference}"' in dumps(clean([definitions, {key: value for key, value in schema.items() if key != "$defs"}])):
            definitions = schema["$defs"]  # it mentions itself somewhere inside
        schema["$defs"] = definitions
        if not definitions:
            del schema["$defs"]
    schema.pop("title", None)
    return schema
