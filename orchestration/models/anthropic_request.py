"""A conversation in chat form as the body of a Messages request. Pure; answers are for `anthropic_reply.py`.

The Messages API wants user and assistant in turn, tool results in the user's message right after the call, and no empty text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestration.core.errors import ModelError
from orchestration.core.model import Message, ModelFault, ToolDefinition
from orchestration.models.wire_json import as_text, object_of, wire_name

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,(.+)", re.DOTALL)

#: Parts that are in the Messages API's own form already.
_NATIVE = frozenset({"image", "document", "tool_result", "search_result", "container_upload"})

_ANY_OBJECT = {"type": "object", "properties": {}}


def messages_payload(
    model: str,
    messages: Sequence[Message],
    tools: Sequence[ToolDefinition] | None,
    *,
    max_tokens: int,
    stream: bool,
    send_thinking: bool,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """The request's body as a JSON object.

    Args:
        max_tokens: the longest answer, in tokens; the API demands one.
        send_thinking: whether signed thinking goes back with the messages that it belongs to.
        extra: further fields; one that is None takes a field away.

    Raises:
        ModelError: content of a kind that the API does not take (`bad_request`).
    """
    system: list[str] = []
    wire: list[dict[str, Any]] = []
    called: dict[str, None] = {}
    for message in messages:
        role = message.get("role")
        if role in ("system", "developer"):
            system.append(as_text(message.get("content")))
            continue
        if role == "assistant":
            blocks = _assistant(message, send_thinking)
            called.update(dict.fromkeys(block["name"] for block in blocks if block["type"] == "tool_use"))
            _append(wire, "assistant", blocks)
        else:
            _append(wire, "user", [_result(message)] if role == "tool" else _blocks(message.get("content")))
    if not wire or wire[0]["role"] != "user":
        # The API refuses a conversation that the assistant opens; it happens after compaction.
        wire.insert(0, {"role": "user", "content": [{"type": "text", "text": "(The conversation goes on.)"}]})
    for message in wire:
        # Results come first, whatever a user said while the tools ran.
        message["content"].sort(key=lambda block: block.get("type") != "tool_result")
    payload: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "messages": wire, "stream": stream}
    text = "\n\n".join(part for part in system if part.strip())
    if text:
        payload["system"] = text
    if tools:
        payload["tools"] = [_tool(tool) for tool in tools]
    elif called:
        # Calls in the history need tools in the request, even where none may be called any more.
        payload["tools"] = [{"name": name, "input_schema": _ANY_OBJECT} for name in called]
        payload["tool_choice"] = {"type": "none"}
    payload.update(extra)
    return {name: value for name, value in payload.items() if value is not None}


def _append(wire: list[dict[str, Any]], role: str, blocks: list[dict[str, Any]]) -> None:
    if not blocks:
        return
    if wire and wire[-1]["role"] == role:
        wire[-1]["content"].extend(blocks)
    else:
        wire.append({"role": role, "content": blocks})


def _assistant(message: Message, send_thinking: bool) -> list[dict[str, Any]]:
    blocks = _signed(message.get("thinking_blocks")) if send_thinking else []
    text = as_text(message.get("content"))
    if text.strip():
        blocks.append({"type": "text", "text": text.rstrip()})
    for call in message.get("tool_calls") or ():
        function = call.get("function")
        function = function if isinstance(function, Mapping) else call
        blocks.append(
            {
                "type": "tool_use",
                "id": _call_id(call.get("id")),
                "name": wire_name(function.get("name")),
                "input": object_of(function.get("arguments")),
            }
        )
    return blocks


def _signed(text: Any) -> list[dict[str, Any]]:
    """The signed thinking that a reply left beside its message; what cannot be read is left out."""
    try:
        found = json.loads(text) if isinstance(text, str) and text else []
    except (ValueError, RecursionError):
        return []
    kinds = ("thinking", "redacted_thinking")
    return [block for block in found if isinstance(block, dict) and block.get("type") in kinds] if isinstance(found, list) else []


def _result(message: Message) -> dict[str, Any]:
    content = message.get("content")
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": _call_id(message.get("tool_call_id"))}
    if isinstance(content, list) and any(isinstance(part, dict) and part.get("type") in ("image_url", "image") for part in content):
        block["content"] = _blocks(content)
    elif as_text(content).strip():
        block["content"] = as_text(content)
    return block


def _blocks(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        text = as_text(content)
        return [{"type": "text", "text": text}] if text.strip() else []
    return [block for part in content if (block := _block(part)) is not None]


def _block(part: Any) -> dict[str, Any] | None:
    if not isinstance(part, dict):
        text = as_text(part)
        return {"type": "text", "text": text} if text.strip() else None
    kind = part.get("type")
    if kind in ("text", "input_text") or (kind is None and "text" in part):
        text = as_text(part.get("text"))
        cached = {"cache_control": part["cache_control"]} if part.get("cache_control") else {}
        return {"type": "text", "text": text, **cached} if text.strip() else None
    if kind in ("image_url", "input_image"):
        given = part.get("image_url")
        return {"type": "image", "source": _image(given.get("url") if isinstance(given, dict) else given)}
    if kind in _NATIVE:
        return part
    raise ModelError(ModelFault.BAD_REQUEST, f"content of type {as_text(kind)[:40]!r} cannot be sent to this provider", retryable=False)


def _image(url: Any) -> dict[str, Any]:
    text = as_text(url).strip()
    data = _DATA_URL.fullmatch(text)
    if data:
        return {"type": "base64", "media_type": data[1].lower().replace("image/jpg", "image/jpeg"), "data": "".join(data[2].split())}
    if text.startswith(("https://", "http://")):
        return {"type": "url", "url": text}
    raise ModelError(ModelFault.BAD_REQUEST, "an image is neither a URL nor base64 data", retryable=False)


def _call_id(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", as_text(value)) or "call"


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool  # one of the provider's own
    parameters = function.get("parameters")
    wire = {"name": function.get("name"), "input_schema": {"type": "object", **parameters} if isinstance(parameters, dict) else _ANY_OBJECT}
    if function.get("description"):
        wire["description"] = function["description"]
    return wire
