"""Typed answers: an agent that must end on data calls a tool with it, and the data is validated before the turn ends.

The class is a pydantic model (or anything that pydantic makes an object of), or a `msgspec.Struct`, each validated by its own
library. What follows from a valid or an invalid answer is for the loop.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from orchestration.core.errors import Misconfigured
from orchestration.core.json_schema import inlined, is_struct
from orchestration.core.safe_json import clean, clean_text, dumps

T = TypeVar("T")

#: Characters of a validator's text that the model and the turn's error get.
MAX_DETAIL_CHARS = 4_000


@dataclass(frozen=True, slots=True)
class Valid:
    """A typed answer that fits, as a JSON value."""

    value: Any


@dataclass(frozen=True, slots=True)
class NotValid:
    """A typed answer that does not fit; `details` says what is wrong where, without the values that were sent."""

    details: str


class AgentOutput(Generic[T]):
    """Says that an agent's turns end on an instance of `cls`, which the model hands in by calling a tool.

    Args:
        cls: a pydantic model, a dataclass, a TypedDict, or a `msgspec.Struct`; its JSON form must be an object.
        tool: the name of that tool.
        max_repairs: how many invalid calls of it are given back to the model to be mended; one more ends the turn.

    Raises:
        Misconfigured: a name that no provider takes, a negative count, or a class without such a schema.
    """

    def __init__(self, cls: type[T], *, tool: str = "submit", max_repairs: int = 1) -> None:
        if not isinstance(tool, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", tool):
            raise Misconfigured(f"AgentOutput(tool={tool!r}): a name is 1 to 64 characters of A-Z a-z 0-9 _ -")
        if isinstance(max_repairs, bool) or not isinstance(max_repairs, int) or max_repairs < 0:
            raise Misconfigured(f"AgentOutput(max_repairs={max_repairs!r}): a whole number of at least 0")
        self.cls = cls
        self.tool = tool
        self.max_repairs = max_repairs
        try:
            self._validator = _Struct(cls) if is_struct(cls) else _Pydantic(cls)
            self.schema = inlined(self._validator.schema())
        except Exception as error:
            raise Misconfigured(f"AgentOutput({cls!r}): no JSON schema can be made of it: {type(error).__name__}: {error}") from error
        if self.schema.get("type") != "object":
            raise Misconfigured(f"AgentOutput({cls!r}): its JSON form must be an object")

    def check(self, arguments: dict[str, Any]) -> Valid | NotValid:
        """Whether `arguments`, a JSON object, are a valid answer; validators of the class run here."""
        return self._validator.check(dumps(arguments))

    def load(self, output: Any) -> T:
        """The instance that a turn's `output` stands for; raises what the class's library raises when it does not fit."""
        return cast(T, self._validator.load(dumps(clean(output))))

    def __repr__(self) -> str:
        return f"AgentOutput({getattr(self.cls, '__name__', self.cls)!s}, tool={self.tool!r}, max_repairs={self.max_repairs})"


class _Pydantic:
    def __init__(self, cls: Any) -> None:
        self._adapter: TypeAdapter[Any] = TypeAdapter(cls)

    def schema(self) -> dict[str, Any]:
        return self._adapter.json_schema()

    def load(self, text: str) -> Any:
        return self._adapter.validate_json(text)

    def check(self, text: str) -> Valid | NotValid:
        try:
            made = self._adapter.validate_json(text)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_input=False, include_context=False)
            lines = [f"{'.'.join(str(part) for part in fault['loc']) or '(the whole answer)'}: {fault['msg']}" for fault in faults]
            return NotValid(clean_text("\n".join(lines))[:MAX_DETAIL_CHARS])
        return Valid(clean(self._adapter.dump_python(made, mode="json", fallback=lambda value: to_jsonable_python(value, fallback=repr))))


class _Struct:
    def __init__(self, cls: Any) -> None:
        self._msgspec: Any = importlib.import_module("msgspec")
        self._cls = cls

    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = self._msgspec.json.schema(self._cls)
        return found

    def load(self, text: str) -> Any:
        return self._msgspec.json.decode(text.encode(), type=self._cls, strict=False)

    def check(self, text: str) -> Valid | NotValid:
        try:
            made = self.load(text)
        except self._msgspec.ValidationError as error:
            return NotValid(clean_text(str(error))[:MAX_DETAIL_CHARS])
        return Valid(clean(self._msgspec.to_builtins(made, str_keys=True)))
