"""Arguments as they came over the mesh, made values by the tool's schema. Pure; whether they fit is pydantic's word, not ours.

A selector carries text only, and peers write it in two ways: JSON (`true`, `[1, 2]`, nothing for null) and Python's own
(`True`, `{'k': 1}`, `None`). Both are read.
"""

from __future__ import annotations

import ast
from typing import Any

from orchestration.mesh import strict_json

#: Longer texts are not tried as Python literals, in characters: the parser is no place for megabytes of a stranger's.
_MAX_LITERAL_CHARS = 64 * 1024

_ANY = frozenset({"string", "integer", "number", "boolean", "null", "object", "array", "any"})


def from_payload(data: bytes) -> dict[str, Any]:
    """The arguments of a JSON payload.

    Raises:
        ValueError: it is no JSON object.
    """
    value = strict_json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("the payload is no JSON object")
    return value


def from_texts(texts: dict[str, str], schema: dict[str, Any]) -> dict[str, Any]:
    """The arguments of selector parameters, each text by what `schema` allows for its name.

    What cannot be read stays text, and is refused when it is validated; names that the schema does not know are dropped.
    """
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return {name: _value(text, _types(known[name], schema)) for name, text in texts.items() if name in known}


def _value(text: str, types: frozenset[str]) -> Any:
    if "null" in types and text == "None" and "any" not in types:
        return None
    if "string" in types and "any" not in types and not types & {"object", "array"}:
        return text
    value = _parsed(text)
    if "any" in types:
        return value
    if isinstance(value, dict):
        return value if "object" in types else text
    if isinstance(value, list):
        return value if "array" in types else text
    if "string" in types:
        return text
    if value is None:
        return None if "null" in types and text in ("None", "null") else text
    # A number or truth value: pydantic converts the text, by the rules of the function's own annotation.
    if isinstance(value, bool) or not isinstance(value, str):
        return value if _fits(value, types) else text
    return text


def _fits(value: Any, types: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int):
        return bool(types & {"integer", "number"})
    return "number" in types


def _parsed(text: str) -> Any:
    """The value that a text stands for, in JSON or as a Python literal; the text itself when it is neither."""
    try:
        return strict_json.loads(text)
    except ValueError:
        pass
    if len(text) > _MAX_LITERAL_CHARS or text[:1] not in "[{(TFN":
        return text
    try:
        return strict_json.strict(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _types(node: Any, schema: dict[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a part of a schema allows; `any` beside all of them where it says nothing."""
    if not isinstance(node, dict) or depth > 10:
        return _ANY
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        return _types(schema.get("$defs", {}).get(reference.removeprefix("#/$defs/")), schema, depth + 1)
    for name in ("anyOf", "oneOf"):
        if isinstance(node.get(name), list):
            return frozenset().union(*[_types(part, schema, depth + 1) for part in node[name]])
    if isinstance(node.get("allOf"), list) and len(node["allOf"]) == 1:
        return _types(node["allOf"][0], schema, depth + 1)
    named = node.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(str(one) for one in named)
    values = node["enum"] if isinstance(node.get("enum"), list) else [node["const"]] if "const" in node else []
    if values:
        return frozenset(_type_of(value) for value in values)
    return _ANY


def _type_of(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"
