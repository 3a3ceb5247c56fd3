"""Tools: how a user declares one, what a catalogue knows of one, and what came of asking one.

A tool is always a key on the mesh; the name that a model sees is made from the key. Who serves it (a tool host, the
worker's own session, an Istos node) makes no difference here.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Generic, ParamSpec, TypeVar

from orchestration.core.errors import CatalogueError, Invalid, Misconfigured
from orchestration.core.keys import is_expression, matches
from orchestration.core.tool_schema import schema_of

#: The longest tool name that providers take (their pattern is `^[A-Za-z0-9_-]{1,64}$`).
MAX_NAME_CHARS = 64

P = ParamSpec("P")
R = TypeVar("R")


def tool_name(prefix: str) -> str:
    """The name under which a model sees the tool at `prefix`: every character outside `[A-Za-z0-9_-]` becomes `-`.

    A name longer than 64 characters is cut and ends in 8 hexadecimal digits of its hash (rule of the mesh contract).
    """
    name = re.sub(r"[^A-Za-z0-9_-]", "-", prefix)
    if len(name) <= MAX_NAME_CHARS:
        return name
    digest = hashlib.sha256(prefix.encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME_CHARS - 9]}-{digest}"


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool as a catalogue knows it. `approval` is None, True, or the owner's reason; `agent` names the agent of ours that
    answers it, where one does. `takes` is the schema of the owner's, where somebody else wrote `parameters`: what a human is asked about
    fits both."""

    prefix: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    approval: bool | str | None = None
    idempotent: bool = False
    payload: bool = False
    timeout_s: float = 5.0
    service: str = ""
    name: str = ""
    agent: str = ""
    takes: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", tool_name(self.prefix))

    def definition(self) -> dict[str, Any]:
        """The tool as a model is told of it."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


class MeshTool(ToolSpec):
    """A tool of another service, declared by hand: `MeshTool("billing/invoice", description=…, parameters={…})`."""


@dataclass(frozen=True, slots=True)
class Discover:
    """A wish for every tool whose key matches one of `patterns` (Zenoh key expressions), read off the mesh each round."""

    patterns: tuple[str, ...]
    services: tuple[str, ...] = ()
    approval: tuple[str, ...] = ()
    name_prefix: str = ""

    def includes(self, prefix: str) -> bool:
        """Whether the tool at `prefix` is wished for."""
        return any(matches(pattern, prefix) for pattern in self.patterns)


def discover(*patterns: str, services: Sequence[str] = (), approval: Sequence[str] = (), name_prefix: str = "") -> Discover:
    """Tools of the mesh whose keys match `patterns`, e.g. `discover("math/*", "billing/*")`; none given means all.

    Args:
        services: only tools of these services.
        approval: keys (or key expressions) to gate although their owner did not.
        name_prefix: what the model's names of these tools begin with: `gh` makes `gh__issues-list` of `issues/list`.

    Raises:
        Misconfigured: a pattern that matches nothing, or one text where a list of them is meant.
    """
    for name, given in (("services", services), ("approval", approval)):
        if isinstance(given, str):
            raise Misconfigured(f"discover({name}={given!r}): a list of texts")
    for pattern in (*patterns, *approval):
        if not is_expression(pattern):
            raise Misconfigured(f"discover: {pattern!r} matches nothing; a key expression is such as 'billing/*'")
    return Discover(patterns or ("**",), tuple(services), tuple(approval), name_prefix)


def tools_from_discovery(*, services: Sequence[str] = (), prefixes: Sequence[str] = (), approval: Sequence[str] = ()) -> Discover:
    """The same as `discover`, under the name that users of Istos know."""
    return discover(*prefixes, services=services, approval=approval)


class Outcome(StrEnum):
    """What is known after a tool was asked."""

    COMPLETED = "completed"  #: it ran and answered
    FAILED = "failed"  #: it ran, or was refused for good, and said why
    NOT_RUN = "not_run"  #: it certainly did not run; asking again is safe
    UNKNOWN = "unknown"  #: it may have run; nobody knows


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What came of one query. `value` is any JSON value; on failure `code` and `message` say why, for the model to read."""

    outcome: Outcome
    value: Any = None
    code: str = ""
    message: str = ""
    details: Any = None


@dataclass(frozen=True, slots=True)
class ToolQuery:
    """One call on its way to the mesh. `expires_ms` is the epoch millisecond after which its host must refuse it."""

    prefix: str
    arguments: dict[str, Any]
    call_id: str
    tenant: str
    sub: str
    roles: tuple[str, ...] = ()
    timeout_s: float = 5.0
    payload: bool = False
    expires_ms: int = 0
    traceparent: str = ""
    forwarded_token: str = field(default="", repr=False)


class Tool(Generic[P, R]):
    """A function that a tool host serves; still callable as the function that it was."""

    def __init__(self, function: Callable[P, R], spec: ToolSpec, validate: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.function = function
        self.spec = spec
        self.validate = validate
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", spec.name)
        self.__module__ = function.__module__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


def tool(
    prefix: str,
    *,
    approval: bool | str | None = None,
    idempotent: bool = False,
    description: str | None = None,
    timeout_s: float = 5.0,
) -> Callable[[Callable[P, R]], Tool[P, R]]:
    """Declare the decorated function, sync or async, as the tool at `prefix`.

    The signature becomes the schema, the docstring the description, and arguments are validated before the function runs: by
    msgspec where its annotations are of msgspec, else by pydantic.

    Args:
        approval: True, or the reason why a human must agree before each call.
        idempotent: the function may run twice with the same idempotency key without a second effect.
        timeout_s: how long a caller should wait for it, in seconds.

    Raises:
        Misconfigured: the prefix is no plain key, or the signature cannot be made a schema.
    """
    if not is_plain_key(prefix):
        raise Misconfigured(f"@tool({prefix!r}): a tool's key is a plain Zenoh key such as 'billing/refund'")

    def declare(function: Callable[P, R]) -> Tool[P, R]:
        schema, validate = schema_of(function, prefix)
        text = description if description is not None else inspect.getdoc(function) or ""
        spec = ToolSpec(
            prefix=prefix,
            description=text,
            parameters=schema,
            approval=approval or None,
            idempotent=idempotent,
            payload=True,
            timeout_s=timeout_s,
        )
        return Tool(function, spec, validate)

    return declare


def is_plain_key(prefix: str) -> bool:
    """Whether `prefix` is a key without wildcards that a tool may have."""
    return bool(prefix) and not prefix.startswith(("/", ".istos")) and not prefix.endswith("/") and not re.search(r"[*$?#;\s]|//", prefix)


def attached_tools(tools: Sequence[dict[str, Any]]) -> list[ToolSpec]:
    """The tools that a submission brings for its turn: function definitions as a model takes them, each with its mesh `key`.

    Raises:
        Invalid: an entry that is none; says which and what is wrong.
    """
    specs = []
    for place, entry in enumerate(tools):
        function = entry.get("function", entry)
        key = entry.get("key")
        if not isinstance(key, str) or not is_plain_key(key):
            raise Invalid("an attached tool does not fit", [{"loc": ["tools", place, "key"], "msg": "a plain mesh key"}])
        if not isinstance(function, dict) or not isinstance(function.get("parameters", {}), dict):
            raise Invalid("an attached tool does not fit", [{"loc": ["tools", place, "function"], "msg": "a function definition"}])
        name = function.get("name") or tool_name(key)
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise Invalid("an attached tool does not fit", [{"loc": ["tools", place, "function", "name"], "msg": "1 to 64 of A-Za-z0-9_-"}])
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        specs.append(ToolSpec(key, str(function.get("description") or ""), parameters, name=name))
    return specs


def owned(spec: ToolSpec, owner: ToolSpec | None) -> ToolSpec:
    """An attached tool under its owner's rules: whoever attaches it cannot waive a gate or declare it idempotent."""
    if owner is None:
        return spec
    return replace(
        spec,
        approval=owner.approval,
        idempotent=owner.idempotent,
        payload=owner.payload,
        timeout_s=owner.timeout_s,
        service=owner.service,
        takes=owner.parameters,
    )


def demanded(spec: ToolSpec, owner: ToolSpec | None) -> ToolSpec:
    """A tool that an agent declares by hand, under the approval that its owner demands: whoever declares it cannot waive that."""
    if owner is None:
        return spec
    demands = [said for said in (owner.approval, spec.approval) if said]
    reason = next((said for said in demands if isinstance(said, str)), bool(demands) or None)
    return replace(spec, approval=reason, takes=owner.parameters)


def build_catalogue(specs: Sequence[ToolSpec]) -> dict[str, ToolSpec]:
    """The tools of one round by the name that the model sees.

    The same key twice is one tool (the first mention wins).

    Raises:
        CatalogueError: two different keys give one name; names both, whatever the order they come in.
    """
    catalogue: dict[str, ToolSpec] = {}
    for spec in specs:
        known = catalogue.get(spec.name)
        if known is None:
            catalogue[spec.name] = spec
        elif known.prefix != spec.prefix:
            first, second = sorted((known.prefix, spec.prefix))
            raise CatalogueError(f"tools {first!r} and {second!r} would both be {spec.name!r} to the model; rename one")
    return catalogue
