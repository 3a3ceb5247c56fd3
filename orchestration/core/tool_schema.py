"""A function's signature as the schema of its arguments, and the check of arguments against it.

The annotations say by which library: one of msgspec's (`msgspec.Struct`, `msgspec.Meta`) makes it msgspec, anything else pydantic.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from orchestration.core.errors import Misconfigured
from orchestration.core.json_schema import inlined, is_struct

Validate = Callable[[dict[str, Any]], dict[str, Any]]


def schema_of(function: Callable[..., Any], prefix: str) -> tuple[dict[str, Any], Validate]:
    """The JSON schema of a function's arguments, and what converts a JSON object to them; that raises pydantic's ValidationError.

    Raises:
        Misconfigured: the signature cannot be made a schema; names the tool and why.
    """
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError as error:
        raise Misconfigured(f"@tool({prefix!r}): {error}") from error
    fields: dict[str, tuple[Any, Any]] = {}
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise Misconfigured(f"@tool({prefix!r}): parameter {parameter.name!r} must be a plain named one")
        annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
        fields[parameter.name] = (annotation, ... if parameter.default is parameter.empty else parameter.default)
    libraries = {library for annotation, _ in fields.values() for library in _libraries(annotation)}
    if len(libraries) > 1:
        raise Misconfigured(f"@tool({prefix!r}): its signature mixes annotations of pydantic and of msgspec; one of them checks all")
    name = f"{getattr(function, '__name__', 'tool')}_arguments"
    try:
        schema, validate = (_by_msgspec if "msgspec" in libraries else _by_pydantic)(name, fields)
    except Exception as error:
        raise Misconfigured(f"@tool({prefix!r}): the signature of {function!r} has no JSON schema: {error}") from error
    schema.pop("title", None)
    schema.setdefault("properties", {})
    return schema, validate


def _libraries(annotation: Any) -> Iterator[str]:
    """The libraries whose own things an annotation names, at any depth."""
    msgspec = sys.modules.get("msgspec")
    if is_struct(annotation) or (msgspec is not None and isinstance(annotation, msgspec.Meta)):
        yield "msgspec"
    if isinstance(annotation, FieldInfo) or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        yield "pydantic"
    for part in (*get_args(annotation), *getattr(annotation, "__metadata__", ())):
        yield from _libraries(part)


def _by_pydantic(name: str, fields: dict[str, tuple[Any, Any]]) -> tuple[dict[str, Any], Validate]:
    definitions: dict[str, Any] = dict(fields)
    model = create_model(name, __config__=ConfigDict(arbitrary_types_allowed=False), **definitions)

    def validate(arguments: dict[str, Any]) -> dict[str, Any]:
        checked = model.model_validate(arguments)
        return {field: getattr(checked, field) for field in fields}

    return TypeAdapter(model).json_schema(), validate


def _by_msgspec(name: str, fields: dict[str, tuple[Any, Any]]) -> tuple[dict[str, Any], Validate]:
    msgspec: Any = importlib.import_module("msgspec")
    members = [(field, annotation) if default is ... else (field, annotation, default) for field, (annotation, default) in fields.items()]
    struct = msgspec.defstruct(name, members, kw_only=True)

    def validate(arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            made = msgspec.convert(arguments, struct, strict=False)
        except msgspec.ValidationError as error:
            raise _as_pydantic(name, str(error)) from None
        return {field: getattr(made, field) for field in fields}

    return inlined(msgspec.json.schema(struct)), validate


def _as_pydantic(name: str, text: str) -> ValidationError:
    """A fault of msgspec's, "Expected `int` >= 1 - at `$.limit`", in the form in which all of them are told."""
    said, _, path = text.partition(" - at `$")
    places = re.findall(r"\.(\w+)|\[(\d+)\]", path)
    place = tuple(word or int(number) for word, number in places)
    # braces would be read as a template's
    fault = PydanticCustomError("msgspec", "{said}", {"said": said})
    return ValidationError.from_exception_data(name, [InitErrorDetails(type=fault, loc=place, input=None)])
