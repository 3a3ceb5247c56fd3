"""The bytes of a tool query and of its reply, as the mesh contract has them. Pure: no session, no clock, no log.

Manifests are in `manifest.py`; who may ask is in `tokens.py`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from orchestration.core.tool import Outcome, ToolAnswer
from orchestration.mesh import strict_json

#: The key in a reply's JSON that says whether it is an error.
MARKER = "__istos_error"

#: Larger replies are refused, in bytes: they would be held several times over on their way to the model.
MAX_REPLY_BYTES = 32 * 1024 * 1024

#: Codes with which an owner says that nothing ran, so that asking again is safe.
NOT_RUN_CODES = frozenset({"rate_limit_exceeded", "expired", "store_unavailable"})

#: The code with which an owner says that it may have run.
UNKNOWN_CODE = "unknown_outcome"

_MAX_MESSAGE_CHARS = 4000
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_PLAIN_KEY = re.compile(r"[^/*$?#\s]+(/[^/*$?#\s]+)*")


def is_tool_key(key: str) -> bool:
    """Whether `key` is a plain Zenoh key outside `.istos/`: what a tool may have, and what may be asked without asking others too."""
    if len(key) > 1024 or key.split("/", 1)[0] == ".istos":
        return False
    return _PLAIN_KEY.fullmatch(key) is not None and strict_json.clean_text(key) == key


def encode_parameters(arguments: dict[str, Any]) -> str:
    """Selector parameters: `name=value;…`, each part percent-encoded once. None and what JSON cannot say are left out."""
    parts: list[str] = []
    for name, value in arguments.items():
        text = _as_text(strict_json.strict(value))
        if text is not None:
            parts.append(f"{quote(strict_json.clean_text(name))}={quote(text)}")
    return ";".join(parts)


def decode_parameters(text: str) -> dict[str, str]:
    """The texts by name; a name without `=` has the empty text, the last of two equal names counts."""
    found: dict[str, str] = {}
    for part in text.split(";"):
        name, _, value = part.partition("=")
        if name:
            found[unquote(name)] = unquote(value)
    return found


@dataclass(frozen=True, slots=True)
class Attachment:
    """What travels beside a query. `exp` is epoch milliseconds, 0 for none."""

    token: str = ""
    cid: str = ""
    traceparent: str = ""
    idem: str = ""
    exp: int = 0


def encode_attachment(attachment: Attachment) -> bytes | None:
    """The bare token when there is nothing else, compact JSON otherwise, None for nothing.

    `idem` and `exp` travel only beside a correlation id: peers would read an object without it as a token.
    """
    parts: dict[str, Any] = {}
    if attachment.token:
        parts["tok"] = attachment.token
    if attachment.cid:
        parts["cid"] = attachment.cid
    if _TRACEPARENT.fullmatch(attachment.traceparent):
        parts["tp"] = attachment.traceparent
    if attachment.cid and attachment.idem:
        parts["idem"] = attachment.idem
    if attachment.cid and attachment.exp:
        parts["exp"] = attachment.exp
    if not parts:
        return None
    if set(parts) == {"tok"}:
        return strict_json.clean_text(attachment.token).encode()
    return strict_json.dumps(parts).encode()


def decode_attachment(data: bytes | None) -> Attachment:
    """What the attachment says; an unusable correlation id or traceparent counts as none.

    Raises:
        ValueError: an `idem` or `exp` that cannot be honoured, so the query must not run.
    """
    if not data:
        return Attachment()
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return Attachment()
    try:
        parts = strict_json.loads(text) if text.startswith("{") else None
    except ValueError:
        parts = None
    if not isinstance(parts, dict) or not {"tok", "cid", "tp"} & parts.keys():
        return Attachment(token=text)
    idem, exp = parts.get("idem") or "", parts.get("exp") or 0
    if not isinstance(idem, str) or len(idem) > 256:
        raise ValueError("idem must be a text of at most 256 characters")
    if isinstance(exp, bool) or not isinstance(exp, (int, float)):
        raise ValueError("exp must be epoch milliseconds")
    cid, traceparent = _text(parts.get("cid")), _text(parts.get("tp"))
    return Attachment(
        token=_text(parts.get("tok")),
        cid=cid if is_correlation_id(cid) else "",
        traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
        idem=idem,
        exp=int(exp),
    )


def is_correlation_id(text: str) -> bool:
    """Whether peers take `text` as a correlation id: 1 to 200 characters without control characters, quotes, backslashes."""
    return 0 < len(text) <= 200 and not re.search(r'[\x00-\x1f\x7f"\\]', text)


def encode_result(value: Any) -> bytes:
    """A result as one JSON reply. A result that looks like an error says that it is none."""
    value = strict_json.strict(value)
    if isinstance(value, dict) and value.keys() >= {"error", "code", "message"} and MARKER not in value:
        value = {**value, MARKER: False}
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def encode_error(code: str, message: str, *, correlation_id: str = "", details: Any = None) -> bytes:
    """An error as one JSON reply."""
    parts: dict[str, Any] = {MARKER: True, "error": code, "code": code, "message": message}
    if correlation_id:
        parts["correlation_id"] = correlation_id
    if details is not None:
        parts["details"] = details
    return strict_json.dumps(parts).encode()


def decode_reply(payload: bytes, encoding: str = "") -> ToolAnswer:
    """What one reply says. Binary content becomes a short description, never text; what should be JSON and is not is `bad_reply`."""
    kind = encoding.split(";")[0].strip().lower()
    if not payload:
        return ToolAnswer(Outcome.COMPLETED, None, message="the tool answered with an empty result")
    if not _is_textual(kind):
        return ToolAnswer(Outcome.COMPLETED, {"type": kind[:100], "bytes": len(payload), "note": "binary content, not shown"})
    if len(payload) > MAX_REPLY_BYTES:
        return _bad_reply(f"the tool's reply of {len(payload)} bytes is larger than the {MAX_REPLY_BYTES} that are taken")
    try:
        value = strict_json.loads(payload)
    except ValueError:
        if kind.startswith("text/") and kind != "text/json":
            return ToolAnswer(Outcome.COMPLETED, payload.decode("utf-8", "replace"))
        return _bad_reply(f"the tool's reply of {len(payload)} bytes is no JSON")
    return _decode_value(value)


def _decode_value(value: Any) -> ToolAnswer:
    if not isinstance(value, dict):
        return ToolAnswer(Outcome.COMPLETED, value)
    marker = value.get(MARKER)
    failed = bool(marker) if marker is not None else value.keys() >= {"error", "code", "message"}
    if not failed:
        return ToolAnswer(Outcome.COMPLETED, {name: item for name, item in value.items() if name != MARKER})
    code = _text(value.get("code")) or _text(value.get("error")) or "internal_error"
    message = _text(value.get("message")) or f"the tool failed: {code}"
    outcome = Outcome.NOT_RUN if code in NOT_RUN_CODES else Outcome.UNKNOWN if code == UNKNOWN_CODE else Outcome.FAILED
    return ToolAnswer(outcome, code=code[:100], message=message[:_MAX_MESSAGE_CHARS], details=value.get("details"))


def _bad_reply(message: str) -> ToolAnswer:
    return ToolAnswer(Outcome.FAILED, code="bad_reply", message=message)


def _is_textual(kind: str) -> bool:
    """Whether a reply of this encoding is read as JSON (or, for `text/`, as text). Peers send JSON as `zenoh/bytes`."""
    return kind in ("", "zenoh/bytes", "zenoh/string", "application/json") or kind.startswith("text/") or kind.endswith("+json")


def _as_text(value: Any) -> str | None:
    match value:
        case None:
            return None
        case bool():
            return "true" if value else "false"
        case str():
            return value
        case int() | float():
            return repr(value)
        case _:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
