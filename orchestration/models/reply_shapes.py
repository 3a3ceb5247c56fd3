"""What users' own models return, as `ModelReply`: dicts, objects of other libraries, plain text, whole completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestration.core.errors import ModelError
from orchestration.core.model import ModelFault, ModelReply, RequestedCall, Usage
from orchestration.models.finish import chat_usage, count, finish_reason
from orchestration.models.text_pieces import sound


def as_reply(who: str, found: Any) -> ModelReply:
    """`found` as a reply: a `ModelReply` as it is; text; or anything with `content` and `tool_calls` as keys or attributes.

    Raises:
        ModelError: it is none of these (`protocol`, not worth trying again); names its class.
    """
    if isinstance(found, ModelReply):
        return found
    if isinstance(found, str):
        return ModelReply(content=sound(found))
    choices = _get(found, "choices")
    message = found
    label = _get(found, "finish_reason")
    if isinstance(choices, (list, tuple)) and choices:
        message = _get(choices[0], "message")
        label = _get(choices[0], "finish_reason")
    if message is None or not any(_has(message, name) for name in ("content", "tool_calls")):
        raise _odd(who, f"returned a {type(found).__name__}, which is no reply")
    calls = _get(message, "tool_calls")
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise _odd(who, f"returned tool_calls of type {type(calls).__name__}")
    requested = tuple(_call(who, call) for call in calls or ())
    thinking = _get(message, "thinking") or _get(message, "reasoning_content")
    return ModelReply(
        content=_text(who, _get(message, "content")),
        tool_calls=requested,
        thinking=sound(thinking) if isinstance(thinking, str) else "",
        finish_reason=finish_reason(who, label if isinstance(label, str) else "", calls=bool(requested)),
        usage=_usage(_get(found, "usage")),
        model=sound(str(_get(found, "model") or "")),
    )


def _call(who: str, found: Any) -> RequestedCall:
    if isinstance(found, RequestedCall):
        return found
    function = _get(found, "function")
    function = found if function is None else function
    name = _get(function, "name")
    if not isinstance(name, str) or not name:
        raise _odd(who, "returned a tool call without a name")
    arguments = _get(function, "arguments")
    if arguments is None:
        text = ""
    elif isinstance(arguments, str):
        text = arguments
    else:
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise _odd(who, "returned arguments that are no JSON value") from None
    return RequestedCall(name=sound(name), arguments=sound(text), id=sound(str(_get(found, "id") or "")))


def _text(who: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return sound(content)
    if isinstance(content, (list, tuple)):
        texts = [part if isinstance(part, str) else _get(part, "text") for part in content]
        return sound("".join(text for text in texts if isinstance(text, str)))
    raise _odd(who, f"returned content of type {type(content).__name__}")


def _usage(found: Any) -> Usage:
    if isinstance(found, Usage):
        return found
    if isinstance(found, Mapping):
        usage = chat_usage(dict(found)) or Usage()
        return Usage(
            usage.input_tokens,
            usage.output_tokens,
            usage.cached_tokens,
            usage.reasoning_tokens or count(found.get("reasoning_tokens")),
        )
    first, second = ("prompt_tokens", "completion_tokens") if _has(found, "prompt_tokens") else ("input_tokens", "output_tokens")
    return Usage(*(count(_get(found, name)) for name in (first, second, "cached_tokens", "reasoning_tokens")))


def _has(found: Any, name: str) -> bool:
    return name in found if isinstance(found, Mapping) else hasattr(found, name)


def _get(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)


def _odd(who: str, what: str) -> ModelError:
    return ModelError(ModelFault.PROTOCOL, f"{who} {what}", retryable=False)
