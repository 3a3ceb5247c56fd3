"""A conversation as the body of a chat-completions request. Pure; the servers' answers are for `chat_reply.py`.

Strict servers refuse a whole conversation for one odd message, so each message is written anew, field by field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestration.core.model import Message, ToolDefinition
from orchestration.models.wire_json import arguments_text, as_text, wire_name

#: Where an assistant message of ours may hold its thinking, the first found counts.
THINKING_KEYS = ("thinking", "reasoning_content", "reasoning")


def chat_payload(
    model: str,
    messages: Sequence[Message],
    tools: Sequence[ToolDefinition] | None,
    *,
    stream: bool,
    thinking_field: str | None,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """The request's body as a JSON object.

    Args:
        thinking_field: the field in which each assistant message carries its thinking back; None leaves it out.
        extra: further fields; one that is None takes a field away (`{"stream_options": None}`).
    """
    payload: dict[str, Any] = {"model": model, "messages": [_message(message, thinking_field) for message in messages]}
    if tools:
        payload["tools"] = list(tools)
    payload["stream"] = stream
    if stream:
        payload["stream_options"] = {"include_usage": True}
    payload.update(extra)
    return {name: value for name, value in payload.items() if value is not None}


def _message(message: Message, thinking_field: str | None) -> dict[str, Any]:
    role = str(message.get("role", "user"))
    content = message.get("content")
    wire: dict[str, Any] = {"role": role}
    if role == "tool":
        wire["tool_call_id"] = as_text(message.get("tool_call_id"))
        wire["content"] = as_text(content)
        return wire
    wire["content"] = content if isinstance(content, list) and content else as_text(content)
    if isinstance(message.get("name"), str) and message["name"]:
        wire["name"] = message["name"]
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            wire["tool_calls"] = [_call(call) for call in calls]
        if thinking_field is not None:
            wire[thinking_field] = thinking_of(message)
    return wire


def thinking_of(message: Message) -> str:
    """The thinking that an assistant message in the history holds."""
    return next((message[key] for key in THINKING_KEYS if isinstance(message.get(key), str) and message[key]), "")


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else call
    return {
        "id": as_text(call.get("id")),
        "type": "function",
        "function": {"name": wire_name(function.get("name")), "arguments": arguments_text(function.get("arguments"))},
    }
