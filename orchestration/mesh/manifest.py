"""Manifests: what a service says that it serves, written and read. Pure; a peer's manifest is read with distrust, entry by entry.

Asking for manifests and putting several together is `discovery.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator

from orchestration.core.tool import ToolSpec
from orchestration.mesh import strict_json
from orchestration.mesh.wire import is_tool_key

#: Under this key plus the service's name each service answers its manifest.
CAPABILITIES = ".istos/capabilities"

#: Larger manifests are not read, in bytes.
MAX_MANIFEST_BYTES = 8 * 1024 * 1024

#: A larger schema is refused, in characters of JSON: it travels in every request to the model.
MAX_SCHEMA_CHARS = 64 * 1024

_MAX_DESCRIPTION_CHARS = 16 * 1024
_DEFAULT_TIMEOUT_S = 5.0
_MAX_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tools of one service, and what in its manifest could not be used: `(prefix or position, why)`."""

    service: str
    tools: tuple[ToolSpec, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()


def manifest_key(service: str) -> str:
    """The key that answers the manifest of `service`; characters that a key may not have become `-`."""
    return f"{CAPABILITIES}/{service_chunk(service)}"


def service_chunk(service: str) -> str:
    """A service's name as one chunk of a key."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", service).strip("-") or "istos"


def encode_manifest(service: str, tools: Sequence[ToolSpec], *, records: bool) -> bytes:
    """The manifest of `tools`. Without `records` of past calls no tool is announced as idempotent."""
    entries: list[dict[str, Any]] = []
    for spec in tools:
        entry: dict[str, Any] = {"prefix": spec.prefix, "kind": "handle", "description": spec.description or None}
        if spec.parameters.get("properties"):
            entry["params_schema"] = spec.parameters
        if spec.approval:
            entry["approval"] = spec.approval
        if spec.idempotent and records:
            entry["idempotent"] = True
        if spec.payload:
            entry["payload"] = True
        if spec.timeout_s != _DEFAULT_TIMEOUT_S:
            entry["timeout_s"] = spec.timeout_s
        entries.append(entry)
    return strict_json.dumps({"service": service, "capabilities": entries}).encode()


def decode_manifest(payload: bytes) -> Manifest:
    """The tools in a manifest. Entries that are no tools are passed over, broken ones are named in `skipped`.

    Raises:
        ValueError: it is no manifest at all.
    """
    if len(payload) > MAX_MANIFEST_BYTES:
        raise ValueError(f"a manifest of {len(payload)} bytes")
    data = strict_json.loads(payload)
    if not isinstance(data, dict) or not isinstance(data.get("capabilities"), list):
        raise ValueError("a manifest is an object with a list of capabilities")
    service = data.get("service")
    if not isinstance(service, str) or not service or len(service) > 200:
        raise ValueError("a manifest names its service in 1 to 200 characters")
    tools: dict[str, ToolSpec] = {}
    skipped: list[tuple[str, str]] = []
    for position, entry in enumerate(data["capabilities"]):
        try:
            spec = _decode_entry(service, entry)
        except ValueError as error:
            prefix = entry.get("prefix") if isinstance(entry, dict) else None
            skipped.append((prefix[:200] if isinstance(prefix, str) else f"#{position}", str(error)[:200]))
            continue
        if spec is not None:
            # Two entries of one key: the stricter gate stands, whichever comes first.
            first = tools.setdefault(spec.prefix, spec)
            if first is not spec and spec.approval and not first.approval:
                tools[spec.prefix] = spec
    return Manifest(service, tuple(tools.values()), tuple(skipped))


def _decode_entry(service: str, entry: Any) -> ToolSpec | None:
    if not isinstance(entry, dict):
        raise ValueError("an entry is an object")
    if entry.get("kind") != "handle":
        return None
    prefix = entry.get("prefix")
    if not isinstance(prefix, str):
        raise ValueError("an entry has a prefix")
    if prefix.split("/", 1)[0] == ".istos":
        return None
    if not is_tool_key(prefix):
        raise ValueError("the prefix is no plain key")
    description = entry.get("description")
    return ToolSpec(
        prefix=prefix,
        description=description[:_MAX_DESCRIPTION_CHARS] if isinstance(description, str) else "",
        parameters=_schema(entry.get("params_schema")),
        approval=_approval(entry.get("approval")),
        idempotent=entry.get("idempotent") is True,
        payload=entry.get("payload") is True,
        timeout_s=_timeout_s(entry.get("timeout_s")),
        service=service,
    )


def _approval(value: Any) -> bool | str | None:
    """Anything but an explicit absence is a gate: a peer that writes it oddly still wants one."""
    if value is None or value is False:
        return None
    return value[:1000] if isinstance(value, str) and value else True


def _timeout_s(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        return _DEFAULT_TIMEOUT_S
    return min(float(value), _MAX_TIMEOUT_S)


def _schema(value: Any) -> dict[str, Any]:
    if value is None:
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        raise ValueError("params_schema is no schema of an object")
    text = strict_json.dumps(value)
    if len(text) > MAX_SCHEMA_CHARS:
        raise ValueError(f"params_schema has {len(text)} characters")
    problem = _schema_problem(text)
    if problem:
        raise ValueError(problem)
    return {"type": "object", "properties": {}, **value}


@lru_cache(maxsize=4096)
def _schema_problem(text: str) -> str:
    """What is wrong with a schema, or nothing. Cached, since every refresh reads the same ones."""
    schema = strict_json.loads(text)
    if not all(_refs_are_local(schema)):
        return "params_schema refers to something outside itself"
    try:
        Draft202012Validator.check_schema(schema)
    except Exception as error:  # the checker itself may stumble over hostile patterns or nesting
        return f"params_schema is invalid: {getattr(error, 'message', type(error).__name__)}"
    return ""


def _refs_are_local(value: Any) -> list[bool]:
    """A foreign reference would make a validator fetch what a peer names."""
    if isinstance(value, list):
        return [ok for item in value for ok in _refs_are_local(item)]
    if not isinstance(value, dict):
        return []
    here = [value[name].startswith("#") for name in ("$ref", "$dynamicRef") if isinstance(value.get(name), str)]
    return here + [ok for item in value.values() for ok in _refs_are_local(item)]
